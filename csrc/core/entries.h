// Coding and decoding of positions one entry, byte or word at a time, in any order, as CUDA threads need it.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"
#include "run_length.h"

namespace hvd_sparse {

// Returns how many of `count` ascending numbers are below `value`.
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

// Returns whether entry j is above the previous entry and below n.
HVD_SPARSE_HD inline bool Ascends(const int64_t* indices, int64_t j, int64_t n) {
  return indices[j] > (j > 0 ? indices[j - 1] : -1) && indices[j] < n;
}

// Returns the number of zeros between entry j and the previous entry in its block, or the start of the block.
HVD_SPARSE_HD inline uint16_t RunBefore(const int64_t* indices, int64_t j) {
  const int64_t start = indices[j] / kBlock * kBlock;
  const int64_t after = j > 0 ? indices[j - 1] + 1 : 0;
  return static_cast<uint16_t>(indices[j] - (after > start ? after : start));
}

// Returns byte `at` of the Elias-Fano section of low bits, which has `low` > 0 bits for each of k entries.
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

template <typename T>
HVD_SPARSE_HD inline uint64_t ReadAligned(const uint8_t* from) {
  T value;
  std::memcpy(&value, __builtin_assume_aligned(from, sizeof(T)), sizeof(T));
  return value;
}

// Reads up to eight bytes of a section, little-endian. Bytes beyond the section's end (`bytes`) count as zero.
HVD_SPARSE_HD inline uint64_t ReadBytes(const uint8_t* section, int64_t bytes, int64_t at, int count) {
  if (at + count <= bytes && reinterpret_cast<uintptr_t>(section + at) % static_cast<uintptr_t>(count) == 0) {
    if (count == 2) return ReadAligned<uint16_t>(section + at);
    if (count == 4) return ReadAligned<uint32_t>(section + at);
    if (count == 8) return ReadAligned<uint64_t>(section + at);
  }
  uint64_t word = 0;
  for (int i = 0; i < count && at + i < bytes; ++i) word |= static_cast<uint64_t>(section[at + i]) << (8 * i);
  return word;
}

// Returns the low bits of entry j; low <= 48.
HVD_SPARSE_HD inline uint64_t LowBitsOf(const uint8_t* section, int64_t bytes, int low, int64_t j) {
  const uint64_t word = ReadBytes(section, bytes, j * low / 8, 8) >> (j * low % 8);
  return word & ((uint64_t{1} << low) - 1);
}

}  // namespace hvd_sparse
