// Positions coded and decoded one entry, byte or word at a time, in any order: what a thread of a device does.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "run_length.h"

namespace hvd_sparse {

// How many of `count` ascending numbers are below `value`.
HVD_SPARSE_HD inline int64_t CountBelow(const int64_t* ascending, int64_t count, int64_t value) {
  int64_t low = 0;
  int64_t high = count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (ascending[middle] < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Whether entry j may follow the one before it.
HVD_SPARSE_HD inline bool Ascends(const int64_t* indices, int64_t j, int64_t n) {
  return indices[j] > (j > 0 ? indices[j - 1] : -1) && indices[j] < n;
}

// The zeros between entry j and the one before it in its block, or the block's start.
HVD_SPARSE_HD inline uint16_t RunBefore(const int64_t* indices, int64_t j) {
  const int64_t start = indices[j] / kBlock * kBlock;
  const int64_t after = j > 0 ? indices[j - 1] + 1 : 0;
  return static_cast<uint16_t>(indices[j] - (after > start ? after : start));
}

// Byte `at` of the low bits of k entries, `low` > 0 of each, one after the other (Elias-Fano).
HVD_SPARSE_HD inline uint8_t LowBitsByte(const int64_t* indices, int64_t k, int low, int64_t at) {
  const int64_t first = 8 * at / low;
  const uint64_t mask = (uint64_t{1} << low) - 1;
  uint32_t byte = 0;
  for (int64_t j = first; j < k && j * low < 8 * at + 8; ++j) {
    const uint64_t bits = static_cast<uint64_t>(indices[j]) & mask;
    const int64_t shift = j * low - 8 * at;
    byte |= static_cast<uint32_t>((shift >= 0 ? bits << shift : bits >> -shift) & 0xffu);
  }
  return static_cast<uint8_t>(byte);
}

// Up to eight bytes of a section of `bytes`, little-endian; what lies behind it counts as zero.
HVD_SPARSE_HD inline uint64_t ReadBytes(const uint8_t* section, int64_t bytes, int64_t at, int count) {
  uint64_t word = 0;
  for (int i = 0; i < count && at + i < bytes; ++i) word |= static_cast<uint64_t>(section[at + i]) << (8 * i);
  return word;
}

// The low bits of entry j; low <= 48.
HVD_SPARSE_HD inline uint64_t LowBitsOf(const uint8_t* section, int64_t bytes, int low, int64_t j) {
  const uint64_t word = ReadBytes(section, bytes, j * low / 8, 8) >> (j * low % 8);
  return word & ((uint64_t{1} << low) - 1);
}

}  // namespace hvd_sparse
