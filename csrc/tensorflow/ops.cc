// The TensorFlow ops: inputs, outputs and shapes. All libraries share one registry of names, so the names have a
// prefix. Numbers that may change from step to step are inputs, so that no function is traced again.
#include <algorithm>
#include <initializer_list>
#include <vector>

#include "../core/payload.h"
#include "attributes.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"

namespace hvd_sparse {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

constexpr int kAnyRank = -1;

absl::Status CheckRanks(InferenceContext* c, std::initializer_list<int> ranks) {
  int input = 0;
  for (const int rank : ranks) {
    ShapeHandle unused;
    if (rank != kAnyRank) TF_RETURN_IF_ERROR(c->WithRank(c->input(input), rank, &unused));
    ++input;
  }
  return absl::OkStatus();
}

// Returns the value of an input if the graph knows it, else unknown. A negative value also counts as unknown, because
// the kernel reports it with a better message than shape inference could.
int64_t KnownCount(InferenceContext* c, int input) {
  const tensorflow::Tensor* tensor = c->input_tensor(input);
  if (tensor == nullptr || tensor->dims() != 0) return InferenceContext::kUnknownDim;
  return std::max<int64_t>(tensor->scalar<int64_t>()(), InferenceContext::kUnknownDim);
}

absl::Status SetVectors(InferenceContext* c, DimensionHandle size) {
  c->set_output(0, c->Vector(size));
  c->set_output(1, c->Vector(size));
  return absl::OkStatus();
}

absl::Status SelectTopKShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {kAnyRank, 0, 0, 0}));
  c->set_output(2, c->Vector(2));
  return SetVectors(c, c->MakeDim(KnownCount(c, 1)));
}

absl::Status PackShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {1, 1, 0, 0, 2}));
  PayloadFormat format;
  TF_RETURN_IF_ERROR(GetFormat(c, &format));
  format.n = KnownCount(c, 2);
  format.k = KnownCount(c, 3);
  const tensorflow::Tensor* segments = c->input_tensor(4);
  const bool single = segments != nullptr && segments->dims() == 2 && segments->dim_size(0) == 0;
  int64_t size = 0;
  const bool known = (single || !IsLowBit(format.dtype)) && PayloadSize(format, &size).ok();
  c->set_output(0, c->Vector(known ? size : InferenceContext::kUnknownDim));
  return absl::OkStatus();
}

absl::Status UnpackShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {1, 0, 0, 2}));
  return SetVectors(c, c->UnknownDim());  // k entries, or none
}

absl::Status ReducePayloadsShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {2, 0, 0, 0, 0, 2}));
  c->set_output(0, c->Vector(KnownCount(c, 2)));
  return absl::OkStatus();
}

absl::Status LocatePayloadsShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {1, 0}));
  std::vector<int64_t> ns;
  TF_RETURN_IF_ERROR(c->GetAttr("ns", &ns));
  c->set_output(
      0, c->MakeShape({c->MakeDim(2), c->MakeDim(KnownCount(c, 1)), c->MakeDim(static_cast<int64_t>(ns.size()))}));
  return absl::OkStatus();
}

absl::Status TokenShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(CheckRanks(c, {0}));
  c->set_output(0, c->Vector(2));
  return absl::OkStatus();
}

constexpr char kValueTypes[] = "T: {float, double, half, bfloat16}";

REGISTER_OP("HvdSparseAccumulate")
    .Input("gradient: T")
    .Input("factor: float")
    .Input("residual: resource")
    .Input("velocity: V * resource")
    .Input("parameter: P * float")
    .Input("is_active: bool")
    .Output("finite: bool")
    .Attr(kValueTypes)
    .Attr("V: int >= 0 = 0")
    .Attr("P: int >= 0 = 0")
    .Attr("momentum: float = 0.0")
    .Attr("nesterov: bool = false")
    .Attr("weight_decays: list(float) = []")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("Adds a gradient to its error feedback if active; tells whether it was finite.");

REGISTER_OP("HvdSparseSelectTopK")
    .Input("values: T")
    .Input("k: int64")
    .Input("seed: int64")
    .Input("threshold_hint: double")
    .Output("indices: int64")
    .Output("selected: T")
    .Output("info: double")
    .Attr(kValueTypes)
    .SetShapeFn(SelectTopKShape)
    .Doc("Exactly the k elements of largest magnitude, in ascending order; info: smallest magnitude, how many passed.");

REGISTER_OP("HvdSparseAllFinite")
    .Input("values: T")
    .Output("finite: bool")
    .Attr(kValueTypes)
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("Whether every element is a finite float32.");

REGISTER_OP("HvdSparsePack")
    .Input("indices: int64")
    .Input("values: V")
    .Input("n: int64")
    .Input("k: int64")
    .Input("segments: int64")
    .Output("payload: uint8")
    .Attr("V: {float, double}")
    .Attr(kCoding)
    .Attr(kValueDType)
    .SetShapeFn(PackShape)
    .Doc("The payload of k entries, or of none, of n elements.");

REGISTER_OP("HvdSparseUnpack")
    .Input("payload: uint8")
    .Input("n: int64")
    .Input("k: int64")
    .Input("segments: int64")
    .Output("indices: int64")
    .Output("values: V")
    .Attr("V: {float, double} = DT_FLOAT")
    .Attr(kCoding)
    .Attr(kValueDType)
    .SetShapeFn(UnpackShape)
    .Doc("The entries of a payload, once it has been checked.");

REGISTER_OP("HvdSparseReducePayloads")
    .Input("gathered: uint8")
    .Input("offset: int64")
    .Input("n: int64")
    .Input("k: int64")
    .Input("scale: float")
    .Input("segments: int64")
    .Output("sum: float")
    .Attr(kCoding)
    .Attr(kValueDType)
    .SetShapeFn(ReducePayloadsShape)
    .Doc("Scale times the sum, in rank order, of the payloads at gathered[:, offset:].");

REGISTER_OP("HvdSparseLocatePayloads")
    .Input("gathered: uint8")
    .Input("ranks: int64")
    .Output("places: int64")
    .Attr("ns: list(int) >= 1")
    .Attr("channels: list(int) = []")
    .Attr(kCoding)
    .Attr(kValueDType)
    .SetShapeFn(LocatePayloadsShape)
    .Doc("Offsets and k, [2, ranks, ns], of payloads whose numbers of entries differ between ranks.");

REGISTER_OP("HvdSparseQuantize")
    .Input("values: float")
    .Input("indices: int64")
    .Input("segments: int64")
    .Output("quantized: float")
    .Attr("level: {'mean', 'min'} = 'mean'")
    .Attr(kValueDType)
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("The float32 values that survive the wire as value_dtype.");

// This op always returns the same value, but it is declared stateful. Otherwise TensorFlow could evaluate it, and ops
// that depend on it, once during graph optimisation. Horovod must all-reduce the token in every step on every rank.
REGISTER_OP("HvdSparseToken")
    .Input("rank: int64")
    .Output("token: float")
    .SetIsStateful()
    .SetShapeFn(TokenShape)
    .Doc("What a rank sends in place of its gradient: 1, and its rank plus 1.");

// After TensorFlow's own ResourceScatterUpdate, every read of the whole variable copies it. This op avoids that.
REGISTER_OP("HvdSparseScatterUpdate")
    .Input("variable: resource")
    .Input("indices: int64")
    .Input("values: float")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Sets a float32 variable's elements at the indices, in place.");

}  // namespace
}  // namespace hvd_sparse
