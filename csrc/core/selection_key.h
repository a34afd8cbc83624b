// The total order of a selection as integers. The element with the larger key comes first; among equal keys, the one
// with the smaller tie value.
#pragma once

#include "dtype.h"
#include "host_device.h"
#include "random.h"

namespace hvd_sparse {

constexpr uint64_t kNanKey = 0;
constexpr uint64_t kZeroKey = 1;

constexpr int kDigitBits = 11;  // bits of a digit, in a radix selection

// Returns the key: numbers come first, by magnitude, then zeros, then NaN.
template <typename T>
HVD_SPARSE_HD inline uint64_t SelectionKey(T value) {
  const uint64_t bits = MagnitudeBits(value);
  constexpr uint64_t kInfinity = kInfinityBits<T>;
  return bits > kInfinity ? kNanKey : bits + 1;
}

// Returns the tie value: a seeded hash of the index; for zeros and NaN, the index.
HVD_SPARSE_HD inline uint64_t TieKey(uint64_t key, uint64_t seed, int64_t index) {
  const auto place = static_cast<uint64_t>(index);
  return key > kZeroKey ? Hash(seed, place) : place;
}

// Returns the magnitude of a key; 0 for NaN.
template <typename T>
HVD_SPARSE_HD inline double MagnitudeOfKey(uint64_t key) {
  return key > kZeroKey ? MagnitudeFromBits(T{}, static_cast<BitsOf<T>>(key - 1)) : 0.0;
}

}  // namespace hvd_sparse
