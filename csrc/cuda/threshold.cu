#include "threshold.h"

#include "radix_select.cuh"

namespace hvd_sparse {
namespace {

struct ThresholdWork {
  ThresholdWork(void* base, DType dtype, const ThresholdPlan& plan) {
    Workspace workspace(base);
    state = workspace.Take<SelectState>(1);
    sample = workspace.Take<uint8_t>(plan.is_sampled ? plan.size * ItemSize(dtype) : 0);
    size = workspace.used();
  }

  SelectState* state;
  void* sample;
  int64_t size;
};

__global__ void begin_threshold_kernel(SelectState* state, int64_t rank) {
  state->wanted = static_cast<uint64_t>(rank);  // there are no candidates, so all elements are read
  state->key.rank = static_cast<Count>(rank);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sample_kernel(const T* data, int64_t n, int64_t size, uint64_t seed, T* sample) {
  for (int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x; j < size; j += int64_t{gridDim.x} * kThreads) {
    sample[j] = data[SamplePosition(n, size, seed, j)];
  }
}

template <typename T>
__global__ void finish_threshold_kernel(const SelectState* state, double* threshold) {
  *threshold = MagnitudeOfKey<T>(state->key.prefix);
}

}  // namespace

int64_t select_threshold_workspace_size(DType dtype, const ThresholdPlan& plan) {
  return ThresholdWork(nullptr, dtype, plan).size;
}

cudaError_t select_threshold_launch(const Array& values, const ThresholdPlan& plan, uint64_t seed, double* threshold,
                                    void* workspace, cudaStream_t stream) {
  const ThresholdWork work(workspace, values.dtype, plan);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(work.state, 0, sizeof(SelectState), stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(begin_threshold_kernel, 1, 1, stream, work.state, plan.rank));
  return Dispatch(values, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    auto* sample = static_cast<T*>(work.sample);
    if (plan.is_sampled) {
      HVD_SPARSE_CUDA_RETURN_IF_ERROR(
          Launch(sample_kernel<T>, BlocksFor(plan.size), kThreads, stream, data, values.size, plan.size, seed, sample));
    }
    SelectJob<T> job{};
    job.elements.data = plan.is_sampled ? sample : data;
    job.elements.n = plan.size;
    job.candidates.state = work.state;  // without room: all elements are read
    unsigned blocks = 0;
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(BusyBlocksFor(plan.size, kTile, &blocks));
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(FindKey(BatchOf(job, blocks), stream));
    return Launch(finish_threshold_kernel<T>, 1, 1, stream, work.state, threshold);
  });
}

}  // namespace hvd_sparse
