// CRC-32 of payloads, on a device: parts that are read at the same time, summed as core/checksum.h says.
#pragma once

#include "../core/checksum.h"
#include "launch.h"

namespace hvd_sparse {

// Adds to sums[i], which must be zero, the remainder of payload i of `count` <= kLargestGridHeight; payload i is the
// `size` bytes at payloads + i * stride, with its own checksum taken as zero.
cudaError_t checksum_launch(const uint8_t* payloads, int64_t stride, int64_t count, int64_t size, uint32_t* sums,
                            cudaStream_t stream);

// What the remainder of `size` bytes is to be joined with, to become their checksum.
inline uint32_t ChecksumStart(int64_t size) {
  static constexpr CrcPowers kPowers = MakeCrcPowers();
  return ~CrcShift(0xffffffffu, static_cast<uint64_t>(size), kPowers);
}

}  // namespace hvd_sparse
