// CRC-32 of payloads, on a device: parts that are read at the same time, summed as core/checksum.h says.
#pragma once

#include "../core/checksum.h"
#include "launch.h"

namespace hvd_sparse {

// Adds to sums[i], which must be zero, the remainder of payload i of `count` <= kLargestGridHeight; payload i is the
// `size` bytes at payloads + i * stride, with its own checksum taken as zero.
cudaError_t checksum_launch(const uint8_t* payloads, int64_t stride, int64_t count, int64_t size, uint32_t* sums,
                            cudaStream_t stream);

// Kernels index it: a table of constants cannot be shared between host and device otherwise.
inline const CrcPowers& Powers() {
  static constexpr CrcPowers kPowers = MakeCrcPowers();
  return kPowers;
}

// The checksum of `size` bytes from their remainder.
HVD_SPARSE_HD inline uint32_t ChecksumOf(uint32_t remainder, int64_t size, const CrcPowers& powers) {
  return ~(CrcShift(0xffffffffu, static_cast<uint64_t>(size), powers) ^ remainder);
}

}  // namespace hvd_sparse
