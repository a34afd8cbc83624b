// GPU kernels of the ops on rows. They do not wait for the device.
#include "../cuda/row_select.h"
#include "cuda_call.h"
#include "rows.h"

namespace hvd_sparse {
namespace {

class CudaSelectTopKRowsKernel : public SelectTopKRowsBase {
 public:
  using SelectTopKRowsBase::SelectTopKRowsBase;

 protected:
  absl::Status Select(const Call& call, const Matrix& values, int64_t k, uint64_t seed, uint8_t* mask,
                      double* thresholds) const override {
    DeviceWork work;
    TF_RETURN_IF_ERROR(work.Open(call));
    return CudaStatus(select_top_k_rows_launch(values, k, seed, mask, thresholds, work.stream()));
  }
};

class CudaLaplaceThresholdRowsKernel : public LaplaceThresholdRowsBase {
 public:
  using LaplaceThresholdRowsBase::LaplaceThresholdRowsBase;

 protected:
  absl::Status Estimate(const Call& call, const Matrix& values, double density, double* thresholds) const override {
    double factor = 0;
    DeviceWork work;
    TF_RETURN_IF_ERROR(call.Report(LaplaceFactor(density, &factor)));
    TF_RETURN_IF_ERROR(work.Open(call));
    return CudaStatus(laplace_threshold_rows_launch(values, factor, thresholds, work.stream()));
  }
};

class CudaFilterThresholdRowsKernel : public FilterThresholdRowsBase {
 public:
  using FilterThresholdRowsBase::FilterThresholdRowsBase;

 protected:
  absl::Status Filter(const Call& call, const Matrix& values, const double* thresholds, int64_t count,
                      uint8_t* mask) const override {
    DeviceWork work;
    TF_RETURN_IF_ERROR(work.Open(call));
    return CudaStatus(filter_threshold_rows_launch(values, thresholds, count, mask, work.stream()));
  }
};

REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(SelectTopKRows).HostMemory("k").HostMemory("seed"), CudaSelectTopKRowsKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(LaplaceThresholdRows).HostMemory("density"), CudaLaplaceThresholdRowsKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(FilterThresholdRows), CudaFilterThresholdRowsKernel);

}  // namespace
}  // namespace hvd_sparse
