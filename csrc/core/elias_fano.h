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

// The same index by index. Inline, so that its numbers can stay in registers while bytes are written.
class EliasFanoWriter {
 public:
  EliasFanoWriter(int64_t n, int64_t k, uint8_t* out)
      : low_(EliasFanoLowBits(n, k)), out_(out), upper_(out + EliasFanoLowerSize(n, k)) {}

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
    if (position / kWord != word_) {
      WriteUpper(kWord / 8);  // something follows it, so there are as many bytes
      word_ = position / kWord;
      ones_ = 0;
    }
    ones_ |= uint64_t{1} << (position % kWord);
  }

  // Writes the bits that are still pending. Call it once, after the last index.
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
  uint64_t pending_ = 0;  // low bits that have not been written
  int filled_ = 0;
  uint64_t ones_ = 0;  // a word of the upper section that is not written yet, and which one
  int64_t word_ = 0;
  int64_t count_ = 0;
};

// Writes indices[k]. Returns CorruptPayload unless the section holds exactly k indices. Does not check their range or
// order.
Status DecodeEliasFano(const uint8_t* section, int64_t k, int64_t n, int64_t* indices);

// A bitmap of (n + 7) / 8 bytes: bit i % 8 of byte i / 8 stands for element i.
inline int64_t BitmapSize(int64_t n) { return (n + 7) / 8; }

// `out` must be zeros.
void EncodeBitmap(const int64_t* indices, int64_t k, uint8_t* out);

// Returns CorruptPayload unless exactly k bits are set.
Status DecodeBitmap(const uint8_t* section, int64_t k, int64_t n, int64_t* indices);

}  // namespace hvd_sparse
