// Payloads of the elements of a matrix that a mask selects: positions and values, or values only if the receiver has
// the mask.
#pragma once

#include <cstring>

#include "payload.h"

namespace hvd_sparse {

// Calls function(i) in ascending order for each i in [0, n) with mask[i] != 0. The function may change the mask up to
// byte i.
template <typename Function>
inline void ForEachKept(const uint8_t* mask, int64_t n, Function&& function) {
  constexpr int64_t kWord = 8;
  constexpr int64_t kTogether = 64;
  int64_t i = 0;
  for (; i + kTogether <= n; i += kTogether) {
    uint64_t kept = 0;
    for (int64_t w = 0; w < kTogether / kWord; ++w) {
      uint64_t bytes;
      std::memcpy(&bytes, mask + i + kWord * w, sizeof bytes);
      constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7full;
      const uint64_t ones = ((((bytes & kLow) + kLow) | bytes) & ~kLow) >> 7;  // 1 for each nonzero byte
      kept |= ((ones * 0x0102040810204080ull) >> 56) << (kWord * w);           // moves byte j to bit j
    }
    for (; kept != 0; kept &= kept - 1) function(i + __builtin_ctzll(kept));
  }
  for (; i < n; ++i) {
    if (mask[i] != 0) function(i);
  }
}

int64_t CountKept(const uint8_t* mask, int64_t n);

// Returns the format of a payload of `kept` of n elements. If kept is 0, it is the format of an empty payload, k = 1.
PayloadFormat RowsFormat(int64_t n, int64_t kept, Coding coding, DType dtype);

// Returns the format of a payload of `kept` values without positions. If kept is 0, it is that of an empty one, n = 1.
PayloadFormat KeptFormat(int64_t kept, DType dtype);

// Packs the values that mask[values.size] selects, with positions: PayloadSize(RowsFormat(values.size, kept, ...))
// bytes. Returns InvalidArgument if their number or their type differs from the format.
Status PackRows(const PayloadFormat& format, const Array& values, const uint8_t* mask, uint8_t* payload);

// Packs the selected values without positions; the format is KeptFormat(kept, ...).
Status PackKept(const PayloadFormat& format, const Array& values, const uint8_t* mask, uint8_t* payload);

// Unpacks a payload to values[format.n] and mask[format.n], with zeros elsewhere. The values have the payload's type;
// if `wide`, 16-bit types become float32.
Status UnpackRows(const PayloadFormat& format, const uint8_t* payload, int64_t size, bool wide, void* values,
                  uint8_t* mask);

// Unpacks a payload without positions to the elements of values[n] that mask[n] selects, with zeros elsewhere. Returns
// CorruptPayload if the number of values differs from the mask's.
Status UnpackKept(DType dtype, const uint8_t* payload, int64_t size, const uint8_t* mask, int64_t n, bool wide,
                  void* values);

}  // namespace hvd_sparse
