// The order of a row selection as integers. The element with the larger key comes first; among equal keys, the one with
// the smaller tie value. NaN comes first, then numbers by magnitude, then zeros.
#pragma once

#include "dtype.h"
#include "host_device.h"
#include "random.h"

namespace hvd_sparse {

template <typename T>
constexpr BitsOf<T> kRowNanKey = static_cast<BitsOf<T>>(kInfinityBits<T> + 1);

template <typename T>
HVD_SPARSE_HD inline BitsOf<T> RowKey(T value) {
  const BitsOf<T> bits = MagnitudeBits(value);
  constexpr BitsOf<T> kNan = kRowNanKey<T>;
  return bits < kNan ? bits : kNan;
}

// Returns the tie value: a seeded hash of the column; for NaN and zeros, the column.
template <typename T>
HVD_SPARSE_HD inline uint64_t RowTie(BitsOf<T> key, uint64_t seed, int64_t column) {
  const auto place = static_cast<uint64_t>(column);
  return key > 0 && key <= kInfinityBits<T> ? Hash(seed, place) : place;
}

// Returns the magnitude of a key.
template <typename T>
HVD_SPARSE_HD inline double MagnitudeOfRowKey(BitsOf<T> key) {
  return key <= kInfinityBits<T> ? MagnitudeFromBits(T{}, key) : MagnitudeFromBits(double{}, 0x7ff8000000000000ull);
}

// Returns the exact magnitude of a value; 0 for NaN and infinities. It consists of integer selects and one subtraction,
// so that it vectorises, and uses no denormals, because the host may flush them to zero.
HVD_SPARSE_HD inline double FiniteMagnitude(double value) {
  const uint64_t bits = MagnitudeBits(value);
  return MagnitudeFromBits(double{}, bits < kInfinityBits<double> ? bits : 0);
}

HVD_SPARSE_HD inline double FiniteMagnitude(float value) {
  constexpr uint64_t kLeast = uint64_t{1023 - 126} << 52;  // the smallest normal float, as a double
  constexpr uint64_t kStep = uint64_t{1} << 52;            // subtracting it halves the number
  const uint32_t bits = MagnitudeBits(value);
  const uint64_t wide = static_cast<uint64_t>(bits) << 29;
  const bool normal = bits >= 0x00800000u;
  const bool finite = bits < kInfinityBits<float>;
  const uint64_t sum = wide + (normal ? kLeast - kStep : kLeast);  // a denormal plus the smallest normal
  const uint64_t excess = normal ? 0 : kLeast;
  return MagnitudeFromBits(double{}, finite ? sum : 0) - MagnitudeFromBits(double{}, excess);
}

HVD_SPARSE_HD inline double FiniteMagnitude(Float16 value) { return FiniteMagnitude(ToFloat(value)); }
HVD_SPARSE_HD inline double FiniteMagnitude(BFloat16 value) { return FiniteMagnitude(ToFloat(value)); }

constexpr int kSumLanes = 16;  // lane c % 16 adds column c, then the lanes are added in order: equal bits everywhere

}  // namespace hvd_sparse
