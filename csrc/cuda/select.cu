#include "select.h"

#include <cmath>

#include "accumulate.h"
#include "radix_select.cuh"
#include "sort.h"

namespace hvd_sparse {
namespace {

// Room for twice as many as are wanted: hints are kept so that a quarter too many is a crowd.
int64_t CapacityFor(int64_t n, int64_t k) { return std::min(n, 2 * k + 4096); }

// The pieces of a selection's workspace.
struct SelectWork {
  SelectWork(void* base, int64_t n, int64_t k) {
    Workspace workspace(base);
    candidates.capacity = CapacityFor(n, k);
    candidates.state = workspace.Take<SelectState>(1);
    candidates.keys = workspace.Take<uint64_t>(candidates.capacity);
    candidates.indices = workspace.Take<int64_t>(candidates.capacity);
    kept = workspace.Take<int64_t>(k);
    sort_status = sort_indices_workspace_size(k, n, &sort_size);
    sort = workspace.Take<uint8_t>(static_cast<int64_t>(sort_size));
    size = workspace.used();
  }

  Candidates candidates;
  int64_t* kept;
  void* sort;
  size_t sort_size = 0;
  cudaError_t sort_status;
  int64_t size;
};

template <typename T>
__global__ void begin_select_kernel(SelectState* state, SelectParams params, const Hint* hint) {
  const double threshold = hint != nullptr ? HintFor(*hint, params.k) : params.threshold_hint;
  const uint64_t bar = threshold > 0 ? SmallestReaching<T>(threshold) : 0;
  state->hinted = threshold > 0 && threshold < INFINITY;
  state->bar = state->hinted ? (bar > 1 ? bar : 1) : uint64_t{kInfinityBits<T>} + 1;
  state->wanted = static_cast<uint64_t>(params.k);
  state->key.rank = static_cast<Count>(params.k);
  state->seed = params.seed;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) gather_kernel(const T* data, int64_t n, Candidates candidates) {
  if (!candidates.state->hinted) return;
  const uint64_t bar = candidates.state->bar;
  for (int64_t base = int64_t{blockIdx.x} * kThreads; base < n; base += int64_t{gridDim.x} * kThreads) {
    const int64_t i = base + threadIdx.x;
    Offer(i < n ? data[i] : T{}, i, bar, candidates);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    finish_select_kernel(const T* data, int64_t k, const SelectState* state, SelectOutput output) {
  auto* values = static_cast<T*>(output.values);
  for (int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x; values != nullptr && j < k;
       j += int64_t{gridDim.x} * kThreads) {
    values[j] = data[output.indices[j]];
  }
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  const double threshold = MagnitudeOfKey<T>(state->key.prefix);
  const auto passed = static_cast<int64_t>(state->hinted ? state->gathered : static_cast<Count>(k));
  output.info[0] = threshold;
  output.info[1] = static_cast<double>(passed);
  if (output.hint != nullptr) LearnHint(output.hint, k, threshold, passed);
}

template <typename T>
cudaError_t Begin(const SelectParams& params, const SelectOutput& output, const SelectWork& work, cudaStream_t stream) {
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.sort_status);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(work.candidates.state, 0, sizeof(SelectState), stream));
  return Launch(begin_select_kernel<T>, 1, 1, stream, work.candidates.state, params, output.hint);
}

// From the gathered candidates to the selection.
template <typename T>
cudaError_t Cut(const T* data, int64_t n, int64_t k, const SelectOutput& output, const SelectWork& work,
                cudaStream_t stream) {
  const SelectSource<T> source{data, n, work.candidates};
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(FindKey(source, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(FindTie(source, stream));
  unsigned blocks = 0;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(BusyBlocksFor(n, kThreads, &blocks));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(keep_kernel<T>, blocks, kThreads, stream, source, work.kept));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(
      sort_indices_launch(work.kept, k, n, work.sort, work.sort_size, output.indices, stream));
  return Launch(finish_select_kernel<T>, BlocksFor(k), kThreads, stream, data, k, work.candidates.state, output);
}

}  // namespace

cudaError_t select_top_k_workspace_size(DType /*dtype*/, int64_t n, int64_t k, int64_t* size) {
  const SelectWork work(nullptr, n, k);
  *size = work.size;
  return work.sort_status;
}

cudaError_t select_top_k_launch(const Array& values, const SelectParams& params, const SelectOutput& output,
                                void* workspace, cudaStream_t stream) {
  const SelectWork work(workspace, values.size, params.k);
  return Dispatch(values, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Begin<T>(params, output, work, stream));
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(gather_kernel<T>, BlocksFor(values.size, 8 * kThreads), kThreads, stream,
                                           data, values.size, work.candidates));
    return Cut(data, values.size, params.k, output, work, stream);
  });
}

cudaError_t accumulate_top_k_launch(const Array& gradient, const AccumulateParams& accumulate,
                                    const SelectParams& params, Memory memory, bool* finite,
                                    const SelectOutput& output, void* workspace, cudaStream_t stream) {
  const SelectWork work(workspace, gradient.size, params.k);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(Begin<float>(params, output, work, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(finite, 1, sizeof(bool), stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(accumulate_launch(gradient, accumulate, memory, finite, work.candidates, stream));
  return Cut<float>(memory.residual, gradient.size, params.k, output, work, stream);
}

}  // namespace hvd_sparse
