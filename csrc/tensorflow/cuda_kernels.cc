// The GPU kernel of all_finite, which does not wait for the device. That of take_sum is in cuda_bucket_kernels.cc; the
// other ops on single tensors run on the CPU.
#include "../cuda/finite.h"
#include "cuda_call.h"

namespace hvd_sparse {

// hvd_sparse/library.py searches the library for this string.
__attribute__((used)) extern const char kCudaMark[] = "hvd_sparse was built with CUDA";

namespace {

class CudaAllFiniteKernel : public Kernel {
 public:
  explicit CudaAllFiniteKernel(OpKernelConstruction* construction) : Kernel(construction, "all_finite") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Array values;
    DeviceWork work;
    bool* finite = nullptr;
    TF_RETURN_IF_ERROR(call.Values(&values));
    TF_RETURN_IF_ERROR(call.Output("finite", {}, &finite));
    TF_RETURN_IF_ERROR(work.Open(call));
    return CudaStatus(all_finite_launch(values, finite, work.stream()));
  }
};

REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(AllFinite), CudaAllFiniteKernel);

}  // namespace
}  // namespace hvd_sparse
