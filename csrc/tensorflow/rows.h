// Base classes of the kernels on rows of a matrix. Inputs and outputs are the same on every device; derived classes do
// the computation.
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

class SelectTopKRowsBase : public Kernel {
 public:
  explicit SelectTopKRowsBase(OpKernelConstruction* construction) : Kernel(construction, "select_top_k_rows") {}

 protected:
  virtual absl::Status Select(const Call& call, const Matrix& values, int64_t k, uint64_t seed, uint8_t* mask,
                              double* thresholds) const = 0;

  absl::Status Run(const Call& call) const final {
    Matrix values{};
    int64_t k = 0;
    uint64_t seed = 0;
    uint8_t* mask = nullptr;
    double* thresholds = nullptr;
    TF_RETURN_IF_ERROR(GetMatrix(call, &values));
    TF_RETURN_IF_ERROR(call.Number("k", &k));
    TF_RETURN_IF_ERROR(call.Seed(&seed));
    TF_RETURN_IF_ERROR(call.Report(CheckRowCount(k, values.columns)));
    TF_RETURN_IF_ERROR(call.Output("mask", {values.rows, values.columns}, &mask));
    TF_RETURN_IF_ERROR(call.Output("thresholds", {values.rows}, &thresholds));
    return Select(call, values, k, seed, mask, thresholds);
  }
};

class LaplaceThresholdRowsBase : public Kernel {
 public:
  explicit LaplaceThresholdRowsBase(OpKernelConstruction* construction)
      : Kernel(construction, "laplace_threshold_rows") {}

 protected:
  virtual absl::Status Estimate(const Call& call, const Matrix& values, double density, double* thresholds) const = 0;

  absl::Status Run(const Call& call) const final {
    Matrix values{};
    double density = 0;
    double* thresholds = nullptr;
    TF_RETURN_IF_ERROR(GetMatrix(call, &values));
    TF_RETURN_IF_ERROR(call.Number("density", &density));
    TF_RETURN_IF_ERROR(call.Output("thresholds", {values.rows}, &thresholds));
    return Estimate(call, values, density, thresholds);
  }
};

class FilterThresholdRowsBase : public Kernel {
 public:
  explicit FilterThresholdRowsBase(OpKernelConstruction* construction)
      : Kernel(construction, "filter_threshold_rows") {}

 protected:
  // thresholds[count]: one for each row, or one for all rows.
  virtual absl::Status Filter(const Call& call, const Matrix& values, const double* thresholds, int64_t count,
                              uint8_t* mask) const = 0;

  absl::Status Run(const Call& call) const final {
    Matrix values{};
    const double* thresholds = nullptr;
    int64_t count = 0;
    uint8_t* mask = nullptr;
    TF_RETURN_IF_ERROR(GetMatrix(call, &values));
    TF_RETURN_IF_ERROR(call.Vector("thresholds", &thresholds, &count));
    if (count != 1 && count != values.rows) {
      return call.Invalid("thresholds must have 1 or ", values.rows, " elements, got ", count);
    }
    TF_RETURN_IF_ERROR(call.Output("mask", {values.rows, values.columns}, &mask));
    return Filter(call, values, thresholds, count, mask);
  }
};

}  // namespace hvd_sparse
