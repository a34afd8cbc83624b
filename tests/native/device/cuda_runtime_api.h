// Replaces the CUDA runtime when the tests run kernels on the host. Every thread of a block is a separate context,
// which is switched when it waits for others. Two kinds of errors end the program: a barrier that not all threads of a
// block reach, and a warp intrinsic that not all threads of the warp call. Races are not detected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__ __attribute__((unused))
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  dim3(unsigned width = 1, unsigned height = 1) : x(width), y(height) {}  // as CUDA's own: implicit
  unsigned x, y;
};

extern dim3 threadIdx, blockIdx, gridDim;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
using cudaStream_t = void*;

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;  // so that kernels need several iterations
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* data, int value, size_t size, cudaStream_t) {
  std::memset(data, value, size);
  return cudaSuccess;
}

namespace hvd_sparse {

cudaError_t RunOnHost(dim3 blocks, int threads, cudaStream_t stream, const std::function<void()>& kernel);

// Exchanges a value of each thread of the block, or of its warp, at a point where all of them wait.
uint64_t* MeetBlock(uint64_t value);
uint64_t* MeetWarp(uint64_t value);

inline int64_t atomic_additions = 0;  // calls of atomicAdd so far: a measure of the work

}  // namespace hvd_sparse

inline void __syncthreads() { hvd_sparse::MeetBlock(0); }
inline void __threadfence() {}

inline unsigned __ballot_sync(unsigned, bool wanted) {
  const uint64_t* all = hvd_sparse::MeetWarp(wanted);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= static_cast<unsigned>(all[lane]) << lane;
  return ballot;
}
inline bool __any_sync(unsigned mask, bool wanted) { return __ballot_sync(mask, wanted) != 0; }
inline unsigned long long __shfl_sync(unsigned, unsigned long long value, int lane) {
  return hvd_sparse::MeetWarp(value)[lane];
}
inline unsigned __reduce_xor_sync(unsigned, unsigned value) {
  const uint64_t* all = hvd_sparse::MeetWarp(value);
  uint64_t sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum ^= all[lane];
  return static_cast<unsigned>(sum);
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline double __longlong_as_double(long long bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T atomicAdd(T* to, T value) {
  ++hvd_sparse::atomic_additions;
  const T before = *to;
  *to += value;
  return before;
}
template <typename T>
void atomicOr(T* to, T value) {
  *to |= value;
}
template <typename T>
void atomicXor(T* to, T value) {
  *to ^= value;
}
template <typename T>
void atomicMin(T* to, T value) {
  if (value < *to) *to = value;
}
template <typename T>
void atomicMax(T* to, T value) {
  if (value > *to) *to = value;
}
