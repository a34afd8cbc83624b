// Positions near the entropy bound: Elias and Fano's code of strictly ascending numbers, and plain bitmaps.
//
// Elias-Fano cuts each index into low bits, as many for all, which are stored one after the other, and the rest, whose
// increments are stored in unary: bit (index >> low) + j of the upper section is set for entry j. It takes half a bit
// an entry more than log2(C(n, k)) / k, whatever the indices are: the size is a function of n and k alone.
#pragma once

#include <cstdint>
#include <cstring>

#include "status.h"

namespace hvd_sparse {

// How many low bits make it shortest: the fewest where two numbers do.
int EliasFanoLowBits(int64_t n, int64_t k);

// Bytes of the low bits and of the upper section, each padded with zero bits. 0 < k <= n.
int64_t EliasFanoLowerSize(int64_t n, int64_t k);
int64_t EliasFanoSize(int64_t n, int64_t k);

// `indices`: k of [0, n), strictly ascending (not checked). Writes EliasFanoSize bytes, of which all were zero.
void EncodeEliasFano(const int64_t* indices, int64_t k, int64_t n, uint8_t* out);

// The same index by index.
class EliasFanoWriter {
 public:
  EliasFanoWriter(int64_t n, int64_t k, uint8_t* out);

  // Indices ascend.
  void Put(int64_t index) {
    const auto bits = static_cast<uint64_t>(index);
    pending_ |= (bits & ((uint64_t{1} << low_) - 1)) << filled_;
    filled_ += low_;
    if (low_ > kHalf) {  // so many would not fit behind half a word
      for (; filled_ >= 8; filled_ -= 8, pending_ >>= 8) *out_++ = static_cast<uint8_t>(pending_);
    } else if (filled_ >= kHalf) {
      std::memcpy(out_, &pending_, kHalf / 8);
      out_ += kHalf / 8;
      filled_ -= kHalf;
      pending_ >>= kHalf;
    }
    const int64_t position = (index >> low_) + count_++;
    upper_[position / 8] |= static_cast<uint8_t>(1u << (position % 8));
  }

  // After the last one.
  void Finish();

 private:
  static constexpr int kHalf = 32;
  int low_;
  uint8_t* out_;
  uint8_t* upper_;
  uint64_t pending_ = 0;  // low bits that are not written yet
  int filled_ = 0;
  int64_t count_ = 0;
};

// Writes indices[k]. CorruptPayload unless there are k of them and nothing behind; they may be any, in any order.
Status DecodeEliasFano(const uint8_t* section, int64_t k, int64_t n, int64_t* indices);

// The same as (n + 7) / 8 bytes: bit i % 8 of byte i / 8 for element i.
inline int64_t BitmapSize(int64_t n) { return (n + 7) / 8; }
void EncodeBitmap(const int64_t* indices, int64_t k, uint8_t* out);
Status DecodeBitmap(const uint8_t* section, int64_t k, int64_t n, int64_t* indices);

}  // namespace hvd_sparse
