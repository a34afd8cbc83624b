// What the kernels on rows share on every device: matrices, checked.
#pragma once

#include "../core/row_select.h"
#include "kernel.h"

namespace hvd_sparse {

inline absl::Status GetMatrix(const Call& call, Matrix* values) {
  const Tensor* tensor = nullptr;
  TF_RETURN_IF_ERROR(call.context()->input("values", &tensor));
  if (tensor->dims() != 2 || tensor->dim_size(1) == 0) {
    return call.Invalid("values must be a matrix with at least one column, got shape ", tensor->shape().DebugString());
  }
  const Array flat = AsArray(*tensor);
  *values = {flat.data, tensor->dim_size(0), tensor->dim_size(1), flat.dtype};
  return absl::OkStatus();
}

inline absl::Status OutputMask(const Call& call, const Matrix& values, uint8_t** mask) {
  return call.Output("mask", {values.rows, values.columns}, mask);
}

inline absl::Status OutputThresholds(const Call& call, const Matrix& values, double** thresholds) {
  return call.Output("thresholds", {values.rows}, thresholds);
}

// One for each row, or one for all.
inline absl::Status GetThresholds(const Call& call, const Matrix& values, const double** thresholds, int64_t* count) {
  TF_RETURN_IF_ERROR(call.Vector("thresholds", thresholds, count));
  if (*count == 1 || *count == values.rows) return absl::OkStatus();
  return call.Invalid("thresholds must have 1 or ", values.rows, " elements, got ", *count);
}

}  // namespace hvd_sparse
