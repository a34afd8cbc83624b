#include "checksum.h"

#include "../core/entries.h"
#include "../core/layout.h"
#include "warp.cuh"

namespace hvd_sparse {
namespace {

constexpr int kSlices = 4;  // bytes that are folded in at a time
constexpr int64_t kBlockBytes = int64_t{CrcChunks::kBytes} * kThreads;
static_assert(kThreads == CrcChunks::kCount, "a thread a chunk");

// tables[s][b]: what byte b contributes when s bytes follow it.
__device__ void MakeTables(uint32_t (*tables)[256]) {
  static_assert(kThreads == 256, "a thread a byte");
  const unsigned byte = threadIdx.x;
  tables[0][byte] = CrcOfByte(byte);
  __syncthreads();
  uint32_t entry = tables[0][byte];
  for (int slice = 1; slice < kSlices; ++slice) {
    entry = (entry >> 8) ^ tables[0][entry & 0xffu];
    tables[slice][byte] = entry;
  }
  __syncthreads();
}

// The payload's word at `at`, a multiple of 4, below a size that is one of 8.
__device__ uint32_t ReadWord(const uint8_t* payload, int64_t at, bool is_aligned) {
  if (at == kChecksumAt) return 0;
  if (is_aligned) return *reinterpret_cast<const uint32_t*>(payload + at);
  return static_cast<uint32_t>(ReadBytes(payload, at + 4, at, 4));
}

// A block sums chunks that lie together, counted from the payload's end, so that what follows a chunk is a multiple of
// its size.
__global__ void __launch_bounds__(kThreads) checksum_kernel(const uint8_t* payloads, int64_t stride, int64_t size,
                                                            CrcPowers powers, CrcChunks chunks, uint32_t* sums) {
  __shared__ uint32_t tables[kSlices][256];
  MakeTables(tables);
  const uint8_t* payload = payloads + int64_t{blockIdx.y} * stride;
  const bool is_aligned = reinterpret_cast<uintptr_t>(payload) % 4 == 0;
  for (int64_t behind = int64_t{blockIdx.x} * kBlockBytes; behind < size; behind += int64_t{gridDim.x} * kBlockBytes) {
    const int64_t end = size - behind - int64_t{threadIdx.x} * CrcChunks::kBytes;
    uint32_t part = 0;
    for (int64_t at = end > CrcChunks::kBytes ? end - CrcChunks::kBytes : 0; at < end; at += 4) {
      part ^= ReadWord(payload, at, is_aligned);
      part = tables[3][part & 0xffu] ^ tables[2][(part >> 8) & 0xffu] ^ tables[1][(part >> 16) & 0xffu] ^
             tables[0][part >> 24];
    }
    const uint32_t sum = __reduce_xor_sync(kWholeWarp, CrcMultiply(part, chunks.of[threadIdx.x]));
    if (threadIdx.x % 32 == 0 && sum != 0) {
      atomicXor(&sums[blockIdx.y], CrcShift(sum, static_cast<uint64_t>(behind), powers));
    }
  }
}

}  // namespace

cudaError_t checksum_launch(const uint8_t* payloads, int64_t stride, int64_t count, int64_t size, uint32_t* sums,
                            cudaStream_t stream) {
  static constexpr CrcPowers kPowers = MakeCrcPowers();
  static constexpr CrcChunks kChunks = MakeCrcChunks();
  const dim3 grid(BlocksFor(size, kBlockBytes), static_cast<unsigned>(count));
  return Launch(checksum_kernel, grid, kThreads, stream, payloads, stride, size, kPowers, kChunks, sums);
}

}  // namespace hvd_sparse
