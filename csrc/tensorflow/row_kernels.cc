// CPU kernels of the ops on rows.
#include "rows.h"

namespace hvd_sparse {
namespace {

class SelectTopKRowsKernel : public SelectTopKRowsBase {
 public:
  using SelectTopKRowsBase::SelectTopKRowsBase;

 protected:
  absl::Status Select(const Call& call, const Matrix& values, int64_t k, uint64_t seed, uint8_t* mask,
                      double* thresholds) const override {
    return call.Report(SelectTopKRows(values, k, seed, call.Pool(), mask, thresholds));
  }
};

class LaplaceThresholdRowsKernel : public LaplaceThresholdRowsBase {
 public:
  using LaplaceThresholdRowsBase::LaplaceThresholdRowsBase;

 protected:
  absl::Status Estimate(const Call& call, const Matrix& values, double density, double* thresholds) const override {
    return call.Report(LaplaceThresholdRows(values, density, call.Pool(), thresholds));
  }
};

class FilterThresholdRowsKernel : public FilterThresholdRowsBase {
 public:
  using FilterThresholdRowsBase::FilterThresholdRowsBase;

 protected:
  absl::Status Filter(const Call& call, const Matrix& values, const double* thresholds, int64_t count,
                      uint8_t* mask) const override {
    return call.Report(FilterThresholdRows(values, thresholds, count, call.Pool(), mask));
  }
};

HVD_SPARSE_REGISTER(SelectTopKRows);
HVD_SPARSE_REGISTER(LaplaceThresholdRows);
HVD_SPARSE_REGISTER(FilterThresholdRows);

}  // namespace
}  // namespace hvd_sparse
