// The TensorFlow ops on buckets. Each member has its own selection, or all members have a joint one. A message has the
// payloads in order. The graph knows the n of each member; the k of each selection may change from step to step.
#include <vector>

#include "attributes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_sparse {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status AccumulateBucketShape(InferenceContext* c) {
  std::vector<tensorflow::DataType> types;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &types));
  bool joint = false;
  TF_RETURN_IF_ERROR(c->GetAttr("joint", &joint));
  const auto members = static_cast<int64_t>(types.size());
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  c->set_output(1, c->Vector(members));
  c->set_output(2, c->Matrix(joint ? 1 : members, 2));
  return absl::OkStatus();
}

absl::Status ReduceBucketShape(InferenceContext* c) {
  std::vector<int64_t> ns;
  TF_RETURN_IF_ERROR(c->GetAttr("ns", &ns));
  if (static_cast<int>(ns.size()) != c->num_outputs()) {
    return absl::InvalidArgumentError("hvd_sparse.reduce_bucket: ns must have one entry a sum");
  }
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(ns[static_cast<size_t>(i)]));
  return absl::OkStatus();
}

absl::Status TakeSumShape(InferenceContext* c) {
  tensorflow::PartialTensorShape shape;
  ShapeHandle output;
  TF_RETURN_IF_ERROR(GetKnownShape(c, "take_sum", &shape));
  TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shape, &output));
  c->set_output(0, output);
  return absl::OkStatus();
}

REGISTER_OP("HvdSparseAccumulateBucket")
    .Input("gradient: T")
    .Input("residual: M * resource")
    .Input("velocity: V * resource")
    .Input("parameter: P * float")
    .Input("factors: float")
    .Input("is_active: bool")
    .Input("ks: int64")
    .Input("seed: int64")
    .Input("threshold_hints: double")
    .Output("message: uint8")
    .Output("finite: bool")
    .Output("info: double")
    .Attr("T: list({float, double, half, bfloat16}) >= 1")
    .Attr("M: int >= 1")
    .Attr("V: int >= 0 = 0")
    .Attr("P: int >= 0 = 0")
    .Attr("momentum: float = 0.0")
    .Attr("nesterov: bool = false")
    .Attr("weight_decays: list(float) = []")
    .Attr("level: {'mean', 'min'} = 'mean'")
    .Attr("channels: list(int) = []")
    .Attr("joint: bool = false")
    .Attr(kCoding)
    .Attr(kValueDType)
    .SetIsStateful()
    .SetShapeFn(AccumulateBucketShape)
    .Doc("HvdSparseAccumulate, HvdSparseSelectTopK, HvdSparseQuantize and HvdSparsePack of each member.");

REGISTER_OP("HvdSparseClearBucket")
    .Input("message: uint8")
    .Input("ks: int64")
    .Input("is_skipped: bool")
    .Input("residual: M * resource")
    .Input("velocity: V * resource")
    .Attr("M: int >= 1")
    .Attr("V: int >= 0 = 0")
    .Attr("channels: list(int) = []")
    .Attr("joint: bool = false")
    .Attr("retained: float = 0.0")
    .Attr(kCoding)
    .Attr(kValueDType)
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(
        "Subtracts the sent values from the residuals, then adds `retained` times them back, and sets the velocities "
        "there to zero; does nothing if `is_skipped`.");

REGISTER_OP("HvdSparseReduceBucket")
    .Input("gathered: uint8")
    .Input("ranks: int64")
    .Input("ks: int64")
    .Input("scale: float")
    .Output("sums: M * float")
    .Attr("M: int >= 1")
    .Attr("ns: list(int) >= 1")
    .Attr("channels: list(int) = []")
    .Attr("joint: bool = false")
    .Attr(kCoding)
    .Attr(kValueDType)
    .SetShapeFn(ReduceBucketShape)
    .Doc("HvdSparseReducePayloads of each member of the ranks' messages, one after the other.");

REGISTER_OP("HvdSparseTakeSum")
    .Input("sum: float")
    .Input("token: float")
    .Input("expected: float")
    .Input("is_skipped: bool")
    .Output("gradient: float")
    .Attr("shape: shape")
    .SetShapeFn(TakeSumShape)
    .Doc("The sum in a gradient's shape, NaN if void; an error unless the token is what was expected.");

}  // namespace
}  // namespace hvd_sparse
