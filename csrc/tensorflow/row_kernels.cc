// CPU kernels of the ops on rows.
#include "rows.h"

namespace hvd_sparse {
namespace {

class SelectTopKRowsKernel : public Kernel {
 public:
  explicit SelectTopKRowsKernel(OpKernelConstruction* construction) : Kernel(construction, "select_top_k_rows") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Matrix values{};
    int64_t k = 0;
    uint64_t seed = 0;
    uint8_t* mask = nullptr;
    double* thresholds = nullptr;
    TF_RETURN_IF_ERROR(GetMatrix(call, &values));
    TF_RETURN_IF_ERROR(call.Number("k", &k));
    TF_RETURN_IF_ERROR(call.Seed(&seed));
    TF_RETURN_IF_ERROR(OutputMask(call, values, &mask));
    TF_RETURN_IF_ERROR(OutputThresholds(call, values, &thresholds));
    return call.Report(SelectTopKRows(values, k, seed, call.Pool(), mask, thresholds));
  }
};

class LaplaceThresholdRowsKernel : public Kernel {
 public:
  explicit LaplaceThresholdRowsKernel(OpKernelConstruction* construction)
      : Kernel(construction, "laplace_threshold_rows") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Matrix values{};
    double density = 0;
    double* thresholds = nullptr;
    TF_RETURN_IF_ERROR(GetMatrix(call, &values));
    TF_RETURN_IF_ERROR(call.Number("density", &density));
    TF_RETURN_IF_ERROR(OutputThresholds(call, values, &thresholds));
    return call.Report(LaplaceThresholdRows(values, density, call.Pool(), thresholds));
  }
};

class FilterThresholdRowsKernel : public Kernel {
 public:
  explicit FilterThresholdRowsKernel(OpKernelConstruction* construction)
      : Kernel(construction, "filter_threshold_rows") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Matrix values{};
    const double* thresholds = nullptr;
    int64_t count = 0;
    uint8_t* mask = nullptr;
    TF_RETURN_IF_ERROR(GetMatrix(call, &values));
    TF_RETURN_IF_ERROR(GetThresholds(call, values, &thresholds, &count));
    TF_RETURN_IF_ERROR(OutputMask(call, values, &mask));
    return call.Report(FilterThresholdRows(values, thresholds, count, call.Pool(), mask));
  }
};

HVD_SPARSE_REGISTER(SelectTopKRows);
HVD_SPARSE_REGISTER(LaplaceThresholdRows);
HVD_SPARSE_REGISTER(FilterThresholdRows);

}  // namespace
}  // namespace hvd_sparse
