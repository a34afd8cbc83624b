// Computes the levels of low-bit values. The host and CUDA devices add magnitudes in the same order, so that the
// results are equal: the entries of a group form chunks of kLevelChunk; each chunk is added in order, then the chunks'
// sums are.
#pragma once

#include <cmath>

#include "dtype.h"
#include "low_bit.h"

namespace hvd_sparse {

constexpr int64_t kLevelChunk = 512;
constexpr uint32_t kUnsetMagnitude = 0xffffffffu;  // no magnitude has the sign bit

// Rounds to the nearest float32. Denormals are built from integers, because the host may flush them to zero.
HVD_SPARSE_HD inline float NarrowMagnitude(double magnitude) {
  if (!(magnitude < 0x1p-126)) return static_cast<float>(magnitude);
  return BitsToFloat(static_cast<uint32_t>(nearbyint(magnitude * 0x1p149)));
}

// The sum, count and minimum of a set of nonzero magnitudes.
struct MagnitudeClass {
  double sum = 0;
  int64_t count = 0;
  uint32_t least = kUnsetMagnitude;

  HVD_SPARSE_HD void Add(uint32_t bits) {
    if (bits == 0) return;
    sum += MagnitudeFromBits(float{}, bits);
    ++count;
    if (bits < least) least = bits;
  }
  HVD_SPARSE_HD void Add(const MagnitudeClass& chunk) {
    sum += chunk.sum;
    count += chunk.count;
    if (chunk.least < least) least = chunk.least;
  }
  HVD_SPARSE_HD double Mean() const { return count > 0 ? sum / static_cast<double>(count) : 0; }
  HVD_SPARSE_HD float Of(Level level) const {
    if (count == 0) return 0;
    return level == Level::kMean ? NarrowMagnitude(Mean()) : BitsToFloat(least);
  }
};

HVD_SPARSE_HD inline float WithSignOf(float value, float magnitude) {
  return BitsToFloat(FloatToBits(magnitude) | (FloatToBits(value) & 0x80000000u));
}

}  // namespace hvd_sparse
