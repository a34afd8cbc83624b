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

// The same index by index. Inline, so that its numbers can stay in registers while bytes are written.
class EliasFanoWriter {
 public:
  EliasFanoWriter(int64_t n, int64_t k, uint8_t* out)
      : low_(EliasFanoLowBits(n, k)), out_(out), upper_(out + EliasFanoLowerSize(n, k)) {}

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
    if (position / kWord != word_) {
      WriteUpper(kWord / 8);  // something follows it, so there are as many bytes
      word_ = position / kWord;
      ones_ = 0;
    }
    ones_ |= uint64_t{1} << (position % kWord);
  }

  // After the last one.
  void Finish() {
    for (; filled_ > 0; filled_ -= 8, pending_ >>= 8) *out_++ = static_cast<uint8_t>(pending_);
    WriteUpper(static_cast<size_t>(kWord - __builtin_clzll(ones_ | 1) + 7) / 8);
  }

 private:
  static constexpr int kHalf = 32;
  static constexpr int kWord = 64;

  void WriteUpper(size_t bytes) { std::memcpy(upper_ + word_ * kWord / 8, &ones_, bytes); }

  int low_;
  uint8_t* out_;
  uint8_t* upper_;
  uint64_t pending_ = 0;  // low bits that are not written yet
  int filled_ = 0;
  uint64_t ones_ = 0;  // a word of the upper section that is not written yet, and which one
  int64_t word_ = 0;
  int64_t count_ = 0;
};

// Writes indices[k]. CorruptPayload unless there are k of them and nothing behind; they may be any, in any order.
Status DecodeEliasFano(const uint8_t* section, int64_t k, int64_t n, int64_t* indices);

// The same as (n + 7) / 8 bytes: bit i % 8 of byte i / 8 for element i.
inline int64_t BitmapSize(int64_t n) { return (n + 7) / 8; }
void EncodeBitmap(const int64_t* indices, int64_t k, uint8_t* out);
Status DecodeBitmap(const uint8_t* section, int64_t k, int64_t n, int64_t* indices);

}  // namespace hvd_sparse
