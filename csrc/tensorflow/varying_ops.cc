// The TensorFlow ops on buckets whose numbers of entries vary from step to step. The graph knows the n of each member.
#include <vector>

#include "../core/partition.h"
#include "attributes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_sparse {
namespace {

using tensorflow::shape_inference::InferenceContext;

absl::Status FilterBucketShape(InferenceContext* c) {
  std::vector<tensorflow::DataType> types;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &types));
  const auto members = static_cast<int64_t>(types.size());
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  c->set_output(1, c->Vector(members));
  c->set_output(2, c->Matrix(members, 2));
  return absl::OkStatus();
}

absl::Status AccumulatePartitionShape(InferenceContext* c) {
  std::vector<tensorflow::DataType> types;
  TF_RETURN_IF_ERROR(c->GetAttr("T", &types));
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  c->set_output(1, c->Vector(1 + kSketchBins));
  c->set_output(2, c->Vector(static_cast<int64_t>(types.size())));
  return absl::OkStatus();
}

absl::Status ReduceLocatedBucketShape(InferenceContext* c) {
  std::vector<int64_t> ns;
  TF_RETURN_IF_ERROR(c->GetAttr("ns", &ns));
  if (static_cast<int>(ns.size()) != c->num_outputs()) {
    return absl::InvalidArgumentError("hvd_sparse.reduce_located_bucket: ns must have one entry a sum");
  }
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(ns[static_cast<size_t>(i)]));
  return absl::OkStatus();
}

REGISTER_OP("HvdSparseFilterBucket")
    .Input("gradient: T")
    .Input("residual: M * resource")
    .Input("velocity: V * resource")
    .Input("parameter: P * float")
    .Input("factors: float")
    .Input("is_active: bool")
    .Input("thresholds: double")
    .Input("ks: int64")
    .Input("stages: int64")
    .Input("seed: int64")
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
    .Attr("distribution: {'exponential', 'gamma', 'pareto'} = 'exponential'")
    .Attr(kCoding)
    .Attr(kValueDType)
    .SetIsStateful()
    .SetShapeFn(FilterBucketShape)
    .Doc(
        "HvdSparseAccumulate of each member; selects residuals by a threshold or by k, then HvdSparseQuantize and "
        "HvdSparsePack.");

REGISTER_OP("HvdSparseAccumulatePartition")
    .Input("gradient: T")
    .Input("residual: M * resource")
    .Input("velocity: V * resource")
    .Input("parameter: P * float")
    .Input("factors: float")
    .Input("is_active: bool")
    .Input("begin: int64")
    .Input("end: int64")
    .Input("threshold: double")
    .Input("share: double")
    .Input("sample: int64")
    .Input("seed: int64")
    .Output("indices: int64")
    .Output("sketch: float")
    .Output("finite: bool")
    .Attr("T: list({float, double, half, bfloat16}) >= 1")
    .Attr("M: int >= 1")
    .Attr("V: int >= 0 = 0")
    .Attr("P: int >= 0 = 0")
    .Attr("momentum: float = 0.0")
    .Attr("nesterov: bool = false")
    .Attr("weight_decays: list(float) = []")
    .SetIsStateful()
    .SetShapeFn(AccumulatePartitionShape)
    .Doc(
        "Accumulates each gradient; returns the indices selected in this rank's partition (MiCRO), and a histogram of "
        "magnitudes.");

REGISTER_OP("HvdSparseReduceLocatedBucket")
    .Input("gathered: uint8")
    .Input("ranks: int64")
    .Input("scale: float")
    .Output("sums: M * float")
    .Attr("M: int >= 1")
    .Attr("ns: list(int) >= 1")
    .Attr("channels: list(int) = []")
    .Attr(kCoding)
    .Attr(kValueDType)
    .SetShapeFn(ReduceLocatedBucketShape)
    .Doc("HvdSparseLocatePayloads, then the sum of each member's payloads.");

}  // namespace
}  // namespace hvd_sparse
