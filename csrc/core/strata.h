// Iterates over a stratified sample.
#pragma once

#include <cstdint>

#include "random.h"

namespace hvd_sparse {

// Returns SamplePosition of consecutive strata, without a division.
class Strata {
 public:
  Strata(int64_t n, int64_t size, uint64_t seed)
      : length_(n / size),
        rest_(n % size),
        size_(size),
        seed_(seed),
        inverse_{Inverse(length_), Inverse(length_ + 1)} {}

  int64_t Next() {
    const int64_t start = start_;
    over_ += rest_;
    const bool longer = over_ >= size_;
    if (longer) over_ -= size_;
    start_ += length_ + longer;
    const auto length = static_cast<uint64_t>(length_ + longer);
    const uint64_t hash = Hash(seed_, static_cast<uint64_t>(number_++));
    const auto quotient = static_cast<uint64_t>(static_cast<unsigned __int128>(hash) * inverse_[longer] >> 64);
    uint64_t left = hash - quotient * length;  // too large by at most two lengths
    while (left >= length) left -= length;
    return start + static_cast<int64_t>(left);
  }

 private:
  static uint64_t Inverse(int64_t length) { return ~uint64_t{0} / static_cast<uint64_t>(length); }

  int64_t length_;
  int64_t rest_;
  int64_t size_;
  uint64_t seed_;
  uint64_t inverse_[2];
  int64_t start_ = 0;
  int64_t over_ = 0;
  int64_t number_ = 0;
};

}  // namespace hvd_sparse
