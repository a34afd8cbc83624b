#include "quantize.h"

namespace hvd_sparse {
namespace {

__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const float* values, int64_t n, DType dtype, float* result) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += int64_t{gridDim.x} * kThreads) {
    result[i] = QuantizeOne(values[i], dtype);
  }
}

}  // namespace

cudaError_t quantize_launch(const float* values, int64_t n, DType dtype, float* result, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return Launch(quantize_kernel, BlocksFor(n), kThreads, stream, values, n, dtype, result);
}

}  // namespace hvd_sparse
