// Reads a mask of bytes 64 at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace hvd_sparse {

// Packs 8 bytes, each 0 or 1, into 8 bits: byte j becomes bit j.
inline uint64_t PackEightBytes(uint64_t bytes) { return (bytes * 0x0102040810204080ull) >> 56; }

// Calls function(i) in ascending order for each i in [0, n) with mask[i] != 0. The function may change the mask up to
// byte i.
template <typename Function>
inline void ForEachSet(const uint8_t* mask, int64_t n, Function&& function) {
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
      kept |= PackEightBytes(ones) << (kWord * w);
    }
    for (; kept != 0; kept &= kept - 1) function(i + __builtin_ctzll(kept));
  }
  for (; i < n; ++i) {
    if (mask[i] != 0) function(i);
  }
}

}  // namespace hvd_sparse
