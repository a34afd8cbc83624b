// Compact codings of positions: the Elias-Fano code of strictly ascending numbers, and plain bitmaps.
//
// Elias-Fano splits each index into `low` low bits, which are stored as they are, and the remaining high bits, whose
// increments are stored in unary: bit (index >> low) + j of the upper section is set for entry j. The code takes about
// half a bit per entry more than the entropy bound log2(C(n, k)) / k. Its size depends only on n and k.
#pragma once

#include <cstdint>
#include <cstring>

#include "status.h"

namespace hvd_sparse {

// Returns the number of low bits that makes the code shortest; the smaller number if two are equally good.
int EliasFanoLowBits(int64_t n, int64_t k);

// The size of the section of low bits, and of both sections, in bytes. Each section is padded with zero bits.
// 0 < k <= n.
int64_t EliasFanoLowerSize(int64_t n, int64_t k);
int64_t EliasFanoSize(int64_t n, int64_t k);

// Writes EliasFanoSize bytes, all of which must be zero before the call. indices: k strictly ascending numbers in
// [0, n); not checked.
void EncodeEliasFano(const int64_t* indices, int64_t k, int64_t n, uint8_t* out);

// Writes the same code index by index.
class EliasFanoWriter {
 public:
  EliasFanoWriter(int64_t n, int64_t k, uint8_t* out);

  // Appends an index. Indices must ascend.
  void Put(int64_t index) {
    const auto bits = static_cast<uint64_t>(index);
    pending_ |= (bits & ((uint64_t{1} << low_) - 1)) << filled_;
    filled_ += low_;
    if (low_ > kHalf) {  // more than half a word would not fit after half a word
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

  // Must be called after the last index.
  void Finish();

 private:
  static constexpr int kHalf = 32;
  int low_;
  uint8_t* out_;
  uint8_t* upper_;
  uint64_t pending_ = 0;  // low bits that have not been written
  int filled_ = 0;
  int64_t count_ = 0;
};

// Writes indices[k]. Returns CorruptPayload unless the section holds exactly k indices. Does not check their range or
// order.
Status DecodeEliasFano(const uint8_t* section, int64_t k, int64_t n, int64_t* indices);

// A bitmap of (n + 7) / 8 bytes: bit i % 8 of byte i / 8 stands for element i.
inline int64_t BitmapSize(int64_t n) { return (n + 7) / 8; }
void EncodeBitmap(const int64_t* indices, int64_t k, uint8_t* out);
Status DecodeBitmap(const uint8_t* section, int64_t k, int64_t n, int64_t* indices);

}  // namespace hvd_sparse
