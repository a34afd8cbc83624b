#include "filter.h"

#include "gather.cuh"
#include "sort.h"

namespace hvd_sparse {
namespace {

constexpr int kRounds = 8;  // iterations of a block

struct FilterWork {
  FilterWork(void* base, int64_t n, int64_t count) {
    Workspace workspace(base);
    kept = workspace.Take<Count>(1);
    indices = workspace.Take<uint64_t>(count);
    sort_status = sort_numbers_workspace_size(count, {0, BitsBelow(n)}, &sort_size);
    sort = workspace.Take<uint8_t>(static_cast<int64_t>(sort_size));
    size = workspace.used();
  }

  Count* kept;
  uint64_t* indices;
  void* sort;
  size_t sort_size = 0;
  cudaError_t sort_status;
  int64_t size;
};

// Counts the elements that reach the bar in *kept, and writes the first `room` indices in any order.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    filter_kernel(const T* data, int64_t n, uint64_t bar, Count* kept, uint64_t* indices, int64_t room) {
  __shared__ Collected<uint64_t, kRounds * kThreads> collected;
  const auto write = [&](int64_t slot, uint64_t index) {
    if (slot < room) indices[slot] = index;
  };
  collected.Begin();
  for (int64_t base = int64_t{blockIdx.x} * kThreads; base < n; base += int64_t{gridDim.x} * kThreads) {
    const int64_t i = base + threadIdx.x;
    collected.Add(i < n && ReachesBar(data[i], bar), static_cast<uint64_t>(i), kept, write);
  }
  collected.Flush(kept, kThreads, write);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    take_kernel(const T* data, const int64_t* indices, int64_t count, T* selected) {
  for (int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x; j < count; j += int64_t{gridDim.x} * kThreads) {
    selected[j] = data[indices[j]];
  }
}

cudaError_t Filter(const Array& values, double threshold, Count* kept, uint64_t* indices, int64_t room,
                   cudaStream_t stream) {
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(kept, 0, sizeof(Count), stream));
  if (values.size == 0) return cudaSuccess;
  return Dispatch(values, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    const unsigned blocks = BlocksFor(values.size, kRounds * kThreads);
    const uint64_t bar = SmallestReaching<T>(threshold);
    return Launch(filter_kernel<T>, blocks, kThreads, stream, data, values.size, bar, kept, indices, room);
  });
}

}  // namespace

cudaError_t count_reaching_launch(const Array& values, double threshold, unsigned long long* count,
                                  cudaStream_t stream) {
  return Filter(values, threshold, count, nullptr, 0, stream);
}

cudaError_t filter_threshold_workspace_size(int64_t n, int64_t count, int64_t* size) {
  const FilterWork work(nullptr, n, count);
  *size = work.size;
  return work.sort_status;
}

cudaError_t filter_threshold_launch(const Array& values, double threshold, int64_t count, int64_t* indices,
                                    void* selected, void* workspace, cudaStream_t stream) {
  const FilterWork work(workspace, values.size, count);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.sort_status);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(Filter(values, threshold, work.kept, work.indices, count, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(sort_numbers_launch(work.indices, count, {0, BitsBelow(values.size)}, work.sort,
                                                      work.sort_size, reinterpret_cast<uint64_t*>(indices),
                                                      stream));  // indices are not negative
  return Dispatch(values, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    return Launch(take_kernel<T>, BlocksFor(count), kThreads, stream, data, indices, count, static_cast<T*>(selected));
  });
}

}  // namespace hvd_sparse
