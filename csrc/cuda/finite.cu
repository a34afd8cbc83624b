#include "finite.h"

#include <type_traits>

#include "../core/update.h"

namespace hvd_sparse {
namespace {

constexpr int kRounds = 8;  // iterations of a block

template <typename T>
__global__ void __launch_bounds__(kThreads) all_finite_kernel(const T* data, int64_t n, bool* finite) {
  bool all = true;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += int64_t{gridDim.x} * kThreads) {
    all &= IsFinite(ToFloat(data[i]));
  }
  if (!all) *finite = false;
}

}  // namespace

cudaError_t all_finite_launch(const Array& values, bool* finite, cudaStream_t stream) {
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(finite, 1, sizeof(bool), stream));
  if (values.size == 0) return cudaSuccess;
  return Dispatch(values, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    const unsigned blocks = BlocksFor(values.size, kRounds * kThreads);
    return Launch(all_finite_kernel<T>, blocks, kThreads, stream, data, values.size, finite);
  });
}

}  // namespace hvd_sparse
