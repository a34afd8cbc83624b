// CRC-32 of payloads on a device. Threads read parts in parallel and combine their remainders, see core/checksum.h.
#pragma once

#include "../core/checksum.h"
#include "../core/entries.h"
#include "../core/payload_sections.h"
#include "batch.cuh"
#include "warp.cuh"

namespace hvd_sparse {
constexpr int kSlices = 4;  // bytes processed per step
constexpr int64_t kBlockBytes = int64_t{CrcChunks::kBytes} * kThreads;
static_assert(kThreads == CrcChunks::kCount, "a thread a chunk");

// tables[s][b]: the contribution of byte b followed by s bytes.
__device__ inline void MakeTables(uint32_t (*tables)[256]) {
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

// Returns the remainder of the `size` bytes, a multiple of 8, that end at `end`. All of them are read before the first
// is used, as memory is slow. The checksum counts as zero.
__device__ inline uint32_t ChunkRemainder(const uint8_t* payload, int64_t end, int size,
                                          const uint32_t (*tables)[256]) {
  constexpr int kPairs = CrcChunks::kBytes / 8;
  uint64_t pairs[kPairs];
  const int64_t begin = end - CrcChunks::kBytes;
  const int first = kPairs - size / 8;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    pairs[p] = p >= first ? ReadBytes(payload, end, begin + 8 * p, 8) : 0;
    if (begin + 8 * p == kChecksumAt) pairs[p] &= 0xffffffff00000000u;
  }
  uint32_t part = 0;
#pragma unroll
  for (int w = 0; w < 2 * kPairs; ++w) {
    part ^= static_cast<uint32_t>(pairs[w / 2] >> (w % 2 * 32));
    part = tables[3][part & 0xffu] ^ tables[2][(part >> 8) & 0xffu] ^ tables[1][(part >> 16) & 0xffu] ^
           tables[0][part >> 24];
  }
  return part;
}

// Adds the remainder of the payload at PayloadOf(job, first + row) to *SumOf(job, row), which must be zero. The
// checksum in the payload counts as zero. A block processes consecutive chunks. Chunks are counted from the payload's
// end, so the bytes after a chunk are a multiple of its size.
template <typename Job>
__global__ void __launch_bounds__(kThreads)
    checksum_kernel(Batch<Job> batch, int64_t first, CrcPowers powers, CrcChunks chunks) {
  __shared__ uint32_t tables[kSlices][256];
  __shared__ uint32_t sum;  // of the block's chunks
  const Share<Job> share = ShareOf(batch);
  const int64_t size = share.job.plan.size;
  if (int64_t{share.block} * kBlockBytes >= size) return;
  MakeTables(tables);
  const uint8_t* payload = PayloadOf(share.job, first + blockIdx.y);
  for (int64_t behind = int64_t{share.block} * kBlockBytes; behind < size;
       behind += int64_t{share.blocks} * kBlockBytes) {
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    const int64_t end = size - behind - int64_t{threadIdx.x} * CrcChunks::kBytes;
    const auto own = static_cast<int>(end < 0 ? 0 : end < CrcChunks::kBytes ? end : CrcChunks::kBytes);
    const uint32_t part = own > 0 ? ChunkRemainder(payload, end, own, tables) : 0;
    const uint32_t of_warp = __reduce_xor_sync(kWholeWarp, CrcMultiply(part, chunks.of[threadIdx.x]));
    if (threadIdx.x % 32 == 0 && of_warp != 0) atomicXor(&sum, of_warp);
    __syncthreads();
    if (threadIdx.x == 0 && sum != 0) {
      atomicXor(SumOf(share.job, blockIdx.y), CrcShift(sum, static_cast<uint64_t>(behind), powers));
    }
  }
}

template <typename Job>
cudaError_t LaunchChecksums(const Batch<Job>& batch, int64_t first, int64_t rows, cudaStream_t stream) {
  static constexpr CrcPowers kPowers = MakeCrcPowers();
  static constexpr CrcChunks kChunks = MakeCrcChunks();
  return Launch(checksum_kernel<Job>, dim3(batch.blocks, static_cast<unsigned>(rows)), kThreads, stream, batch, first,
                kPowers, kChunks);
}

}  // namespace hvd_sparse
