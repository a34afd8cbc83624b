// How kernels are launched: sizes of grids, errors, and pieces of the workspace that the caller passes in.
//
// Every launcher enqueues on the stream it is given and returns: it neither allocates nor waits. Its first failing call
// is what it returns; nothing that it could not launch is run then.
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

constexpr int kThreads = 256;              // of a block, where a kernel says nothing else
constexpr int64_t kMostBlocks = 1 << 30;   // of a grid's first dimension
constexpr int kLargestGridHeight = 65535;  // of its second

inline int64_t DivideUp(int64_t items, int64_t by) { return (items + by - 1) / by; }

// A block for every `per_block` items, one at least; kernels go round again where the grid cannot hold them all.
inline unsigned BlocksFor(int64_t items, int64_t per_block = kThreads) {
  return static_cast<unsigned>(std::clamp<int64_t>(DivideUp(items, per_block), 1, kMostBlocks));
}

// The same, but not more than keep the device busy.
inline cudaError_t BusyBlocksFor(int64_t items, int64_t per_block, unsigned* blocks) {
  constexpr int kBlocksEach = 4;
  int device = 0;
  int processors = 0;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  *blocks = std::min(BlocksFor(items, per_block), static_cast<unsigned>(kBlocksEach * processors));
  return cudaSuccess;
}

// Enqueues a kernel on blocks of `threads`.
template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 blocks, int threads, cudaStream_t stream,
                   const Arguments&... arguments) {
#ifdef __CUDACC__
  kernel<<<blocks, threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
#else
  return RunOnHost(blocks, threads, stream, [&] { kernel(arguments...); });  // of the tests, see tests/native/device
#endif
}

// Cuts a workspace into arrays. With no workspace it only adds up how many bytes they take.
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
