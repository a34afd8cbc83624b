// Launches kernels: grid sizes, errors, and arrays in a workspace that the caller provides.
//
// Every launcher enqueues its kernels on the given stream and returns; it neither allocates nor waits. If a call fails,
// the launcher returns this error at once and launches no further kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#define HVD_SPARSE_CUDA_RETURN_IF_ERROR(expression)         \
  do {                                                      \
    const cudaError_t error_of_call = (expression);         \
    if (error_of_call != cudaSuccess) return error_of_call; \
  } while (false)

namespace hvd_sparse {

constexpr int kThreads = 256;              // threads per block, unless a kernel declares otherwise
constexpr int64_t kMostBlocks = 1 << 30;   // largest first dimension of a grid
constexpr int kLargestGridHeight = 65535;  // largest second dimension of a grid

inline int64_t DivideUp(int64_t items, int64_t by) { return (items + by - 1) / by; }

// Returns one block for every `per_block` items, at least one. Kernels loop if the grid cannot have enough blocks.
inline unsigned BlocksFor(int64_t items, int64_t per_block = kThreads) {
  return static_cast<unsigned>(std::clamp<int64_t>(DivideUp(items, per_block), 1, kMostBlocks));
}

// The same, but at most as many blocks as keep the device busy.
inline cudaError_t BusyBlocksFor(int64_t items, int64_t per_block, unsigned* blocks) {
  constexpr int kBlocksEach = 4;
  int device = 0;
  int processors = 0;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  *blocks = std::min(BlocksFor(items, per_block), static_cast<unsigned>(kBlocksEach * processors));
  return cudaSuccess;
}

// Enqueues a kernel with `threads` threads per block.
template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 blocks, int threads, cudaStream_t stream,
                   const Arguments&... arguments) {
#ifdef __CUDACC__
  kernel<<<blocks, threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
#else
  return RunOnHost(blocks, threads, stream, [&] { kernel(arguments...); });  // for tests, see tests/native/device
#endif
}

// Divides a workspace into arrays. Without a workspace, it only computes their total size in bytes.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <typename T>
  T* Take(int64_t count) {
    const uintptr_t at = base_ + static_cast<uintptr_t>(used_);
    used_ += DivideUp(count * static_cast<int64_t>(sizeof(T)), kAlignment) * kAlignment;
    return reinterpret_cast<T*>(at);
  }

  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 256;

  uintptr_t base_;
  int64_t used_ = 0;
};

}  // namespace hvd_sparse
