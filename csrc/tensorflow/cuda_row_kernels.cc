// Kernels on GPUs of the ops on rows. None waits for the device.
#include "../cuda/row_select.h"
#include "cuda_call.h"
#include "rows.h"

namespace hvd_sparse {
namespace {

class CudaSelectTopKRowsKernel : public Kernel {
 public:
  explicit CudaSelectTopKRowsKernel(OpKernelConstruction* construction) : Kernel(construction, "select_top_k_rows") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Matrix values{};
    int64_t k = 0;
    uint64_t seed = 0;
    uint8_t* mask = nullptr;
    double* thresholds = nullptr;
    DeviceWork work;
    TF_RETURN_IF_ERROR(GetMatrix(call, &values));
    TF_RETURN_IF_ERROR(call.Number("k", &k));
    TF_RETURN_IF_ERROR(call.Seed(&seed));
    TF_RETURN_IF_ERROR(call.Report(CheckRowCount(k, values.columns)));
    TF_RETURN_IF_ERROR(OutputMask(call, values, &mask));
    TF_RETURN_IF_ERROR(OutputThresholds(call, values, &thresholds));
    TF_RETURN_IF_ERROR(work.Open(call));
    return CudaStatus(select_top_k_rows_launch(values, k, seed, mask, thresholds, work.stream()));
  }
};

class CudaLaplaceThresholdRowsKernel : public Kernel {
 public:
  explicit CudaLaplaceThresholdRowsKernel(OpKernelConstruction* construction)
      : Kernel(construction, "laplace_threshold_rows") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Matrix values{};
    double density = 0, factor = 0;
    double* thresholds = nullptr;
    DeviceWork work;
    TF_RETURN_IF_ERROR(GetMatrix(call, &values));
    TF_RETURN_IF_ERROR(call.Number("density", &density));
    TF_RETURN_IF_ERROR(call.Report(LaplaceFactor(density, &factor)));
    TF_RETURN_IF_ERROR(OutputThresholds(call, values, &thresholds));
    TF_RETURN_IF_ERROR(work.Open(call));
    return CudaStatus(laplace_threshold_rows_launch(values, factor, thresholds, work.stream()));
  }
};

class CudaFilterThresholdRowsKernel : public Kernel {
 public:
  explicit CudaFilterThresholdRowsKernel(OpKernelConstruction* construction)
      : Kernel(construction, "filter_threshold_rows") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Matrix values{};
    const double* thresholds = nullptr;
    int64_t count = 0;
    uint8_t* mask = nullptr;
    DeviceWork work;
    TF_RETURN_IF_ERROR(GetMatrix(call, &values));
    TF_RETURN_IF_ERROR(GetThresholds(call, values, &thresholds, &count));
    TF_RETURN_IF_ERROR(OutputMask(call, values, &mask));
    TF_RETURN_IF_ERROR(work.Open(call));
    return CudaStatus(filter_threshold_rows_launch(values, thresholds, count, mask, work.stream()));
  }
};

REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(SelectTopKRows).HostMemory("k").HostMemory("seed"), CudaSelectTopKRowsKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(LaplaceThresholdRows).HostMemory("density"), CudaLaplaceThresholdRowsKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(FilterThresholdRows), CudaFilterThresholdRowsKernel);

}  // namespace
}  // namespace hvd_sparse
