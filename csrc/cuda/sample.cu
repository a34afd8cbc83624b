#include "sample.h"

#include "../core/threshold.h"

namespace hvd_sparse {
namespace {

__global__ void __launch_bounds__(kThreads)
    sample_runs_kernel(const float* values, int64_t strata, int64_t count, int64_t run, uint64_t seed, float* sample) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count * run; i += int64_t{gridDim.x} * kThreads) {
    sample[i] = values[SamplePosition(strata, count, seed, i / run) * run + i % run];
  }
}

}  // namespace

cudaError_t sample_runs_launch(const float* values, int64_t n, int64_t count, int64_t run, uint64_t seed, float* sample,
                               cudaStream_t stream) {
  return Launch(sample_runs_kernel, BlocksFor(count * run), kThreads, stream, values, n / run, count, run, seed,
                sample);
}

}  // namespace hvd_sparse
