// 16-bit run lengths of zeros (DGC, section 3.1), in blocks of 65,536 elements so that a run never overflows.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"
#include "status.h"

namespace hvd_sparse {

constexpr int64_t kBlock = 65536;

HVD_SPARSE_HD inline int64_t BlockCount(int64_t n) { return (n + kBlock - 1) / kBlock; }
HVD_SPARSE_HD inline int64_t BlockLength(int64_t n, int64_t block) {
  return n - block * kBlock < kBlock ? n - block * kBlock : kBlock;
}

// InvalidArgument unless `indices`, k of them, ascend strictly in [0, n).
Status CheckAscending(const int64_t* indices, int64_t k, int64_t n);

// `indices`: k of [0, n), strictly ascending. Writes counts[BlockCount(n)], the entries of each block, and runs[k],
// the zeros between an entry and the one before it in its block (or the block's start).
Status EncodeRunLength(const int64_t* indices, int64_t k, int64_t n, uint32_t* counts, uint16_t* runs);

// Returns the j-th run. `runs` may be unaligned, as in a payload.
inline uint16_t RunAt(const void* runs, int64_t j) {
  uint16_t run;
  std::memcpy(&run, static_cast<const uint8_t*>(runs) + j * int64_t{sizeof run}, sizeof run);
  return run;
}

// Checks that the counts sum to k and that no run leaves its block. Any bytes are safe. runs[k] are uint16 and may be
// unaligned.
Status ValidateRunLength(const uint32_t* counts, const void* runs, int64_t k, int64_t n);

// Writes indices[k]; the input must have been validated.
void DecodeRunLength(const uint32_t* counts, const void* runs, int64_t n, int64_t* indices);

}  // namespace hvd_sparse
