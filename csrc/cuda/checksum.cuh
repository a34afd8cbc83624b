// CRC-32 of payloads on a device. Threads read parts in parallel and combine their remainders, see core/checksum.h.
#pragma once

#include "../core/checksum.h"
#include "../core/entries.h"
#include "../core/layout.h"
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

// Reads the word at offset `at`, a multiple of 4. The size of a payload is a multiple of 8.
__device__ inline uint32_t ReadWord(const uint8_t* payload, int64_t at, bool is_aligned) {
  if (at == kChecksumAt) return 0;
  if (is_aligned) return *reinterpret_cast<const uint32_t*>(payload + at);
  return static_cast<uint32_t>(ReadBytes(payload, at + 4, at, 4));
}

// Adds the remainder of the payload at PayloadOf(job, first + row) to *SumOf(job, row), which must be zero. The
// checksum in the payload counts as zero. A block processes consecutive chunks. Chunks are counted from the payload's
// end, so the bytes after a chunk are a multiple of its size.
template <typename Job>
__global__ void __launch_bounds__(kThreads)
    checksum_kernel(Batch<Job> batch, int64_t first, CrcPowers powers, CrcChunks chunks) {
  __shared__ uint32_t tables[kSlices][256];
  const Share<Job> share = ShareOf(batch);
  const int64_t size = share.job.plan.size;
  if (int64_t{share.block} * kBlockBytes >= size) return;
  MakeTables(tables);
  const uint8_t* payload = PayloadOf(share.job, first + blockIdx.y);
  const bool is_aligned = reinterpret_cast<uintptr_t>(payload) % 4 == 0;
  for (int64_t behind = int64_t{share.block} * kBlockBytes; behind < size;
       behind += int64_t{share.blocks} * kBlockBytes) {
    const int64_t end = size - behind - int64_t{threadIdx.x} * CrcChunks::kBytes;
    uint32_t part = 0;
    for (int64_t at = end > CrcChunks::kBytes ? end - CrcChunks::kBytes : 0; at < end; at += 4) {
      part ^= ReadWord(payload, at, is_aligned);
      part = tables[3][part & 0xffu] ^ tables[2][(part >> 8) & 0xffu] ^ tables[1][(part >> 16) & 0xffu] ^
             tables[0][part >> 24];
    }
    const uint32_t sum = __reduce_xor_sync(kWholeWarp, CrcMultiply(part, chunks.of[threadIdx.x]));
    if (threadIdx.x % 32 == 0 && sum != 0) {
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
