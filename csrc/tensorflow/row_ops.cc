// The TensorFlow ops on rows of a matrix: inputs, outputs and shapes.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_sparse {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// The mask has the shape of the matrix. There is one threshold for each row.
absl::Status SelectTopKRowsShape(InferenceContext* c) {
  ShapeHandle values, unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &values));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &unused));
  c->set_output(0, values);
  c->set_output(1, c->Vector(c->Dim(values, 0)));
  return absl::OkStatus();
}

absl::Status LaplaceThresholdRowsShape(InferenceContext* c) {
  ShapeHandle values, unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &values));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
  c->set_output(0, c->Vector(c->Dim(values, 0)));
  return absl::OkStatus();
}

absl::Status FilterThresholdRowsShape(InferenceContext* c) {
  ShapeHandle values, unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &values));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
  c->set_output(0, values);
  return absl::OkStatus();
}

REGISTER_OP("HvdSparseSelectTopKRows")
    .Input("values: T")
    .Input("k: int64")
    .Input("seed: int64")
    .Output("mask: bool")
    .Output("thresholds: double")
    .Attr("T: {float, double, half, bfloat16}")
    .SetShapeFn(SelectTopKRowsShape)
    .Doc("Exactly the k elements of largest magnitude of each row, NaN first, and the smallest of these magnitudes.");

REGISTER_OP("HvdSparseLaplaceThresholdRows")
    .Input("values: T")
    .Input("density: double")
    .Output("thresholds: double")
    .Attr("T: {float, double, half, bfloat16}")
    .SetShapeFn(LaplaceThresholdRowsShape)
    .Doc("For each row, the magnitude that a fraction `density` of a Laplace distribution exceeds.");

REGISTER_OP("HvdSparseFilterThresholdRows")
    .Input("values: T")
    .Input("thresholds: double")
    .Output("mask: bool")
    .Attr("T: {float, double, half, bfloat16}")
    .SetShapeFn(FilterThresholdRowsShape)
    .Doc("Mask of NaN and of nonzero elements that reach their row's threshold.");

}  // namespace
}  // namespace hvd_sparse
