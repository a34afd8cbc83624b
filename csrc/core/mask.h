// What a mask keeps of a matrix, as payloads: positions and values, or for one who has the mask, values alone.
#pragma once

#include <cstring>

#include "payload.h"

namespace hvd_sparse {

// Calls function(i), ascending, for each of n elements that the mask keeps: whose byte is not 0. It may change the
// bytes up to i.
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
      const uint64_t ones = ((((bytes & kLow) + kLow) | bytes) & ~kLow) >> 7;  // 1 for each byte that is not 0
      kept |= ((ones * 0x0102040810204080ull) >> 56) << (kWord * w);           // byte j's to bit j
    }
    for (; kept != 0; kept &= kept - 1) function(i + __builtin_ctzll(kept));
  }
  for (; i < n; ++i) {
    if (mask[i] != 0) function(i);
  }
}

int64_t CountKept(const uint8_t* mask, int64_t n);

// The form of the payload of `kept` of n elements; of none, of an empty one of k = 1.
PayloadFormat RowsFormat(int64_t n, int64_t kept, Coding coding, DType dtype);

// The form of the payload of `kept` values alone; of none, of an empty one of n = 1.
PayloadFormat KeptFormat(int64_t kept, DType dtype);

// Writes PayloadSize(RowsFormat(values.size, kept, ...)) bytes: what mask[values.size] keeps. InvalidArgument if that
// is not what the format says, or the values are of another type.
Status PackRows(const PayloadFormat& format, const Array& values, const uint8_t* mask, uint8_t* payload);

// The same where the format is KeptFormat(kept, ...).
Status PackKept(const PayloadFormat& format, const Array& values, const uint8_t* mask, uint8_t* payload);

// Sets values[format.n] and mask[format.n] to what a payload holds, zero elsewhere. Values are float32, float64 for
// that type, if `wide`; else of the payload's type.
Status UnpackRows(const PayloadFormat& format, const uint8_t* payload, int64_t size, bool wide, void* values,
                  uint8_t* mask);

// Sets values[n], as above, where mask[n] keeps, zero elsewhere. CorruptPayload if there are not as many.
Status UnpackKept(DType dtype, const uint8_t* payload, int64_t size, const uint8_t* mask, int64_t n, bool wide,
                  void* values);

}  // namespace hvd_sparse
