// Values of 1 or 2 bits on the wire: a sign and one of one or two levels (Gradient Dropping, section 5.4).
//
// int1 sends an element as its sign; the magnitude is the level of its group. int2 has two levels per group, the
// smaller one first, and a second bit: it tells magnitudes below the group's mean from larger ones. Levels are computed
// without zeros. A zero gets the level of the magnitudes below the mean, which is zero if there are none. If all
// magnitudes of a group are equal, both levels have this magnitude, and all elements use the first.
#pragma once

#include <vector>

#include "dtype.h"
#include "status.h"

namespace hvd_sparse {

// The elements from `begin` to the next segment form a row-major matrix of `channels` columns. Each column is a group.
struct Segment {
  int64_t begin;
  int64_t channels;
};
using Segments = std::vector<Segment>;  // empty: all elements are one group

enum class Level { kMean, kMin };  // a level is the mean or the minimum of its magnitudes

inline bool IsLowBit(DType dtype) { return dtype == DType::kInt2 || dtype == DType::kInt1; }

// Returns InvalidArgument unless the segments start at 0, ascend below n, and each has at least one channel and at most
// as many channels as elements.
Status CheckSegments(const Segments& segments, int64_t n);

// Returns the bytes of k values: float32 levels for the largest possible number of groups, then the codes.
// Little-endian.
int64_t LowBitSize(DType dtype, int64_t k, const Segments& segments);

// Sets result[k] to the values that the receiver will decode. `result` may be `values`. Without segments the indices
// are not read. With segments, returns InvalidArgument unless the indices and the starts of the segments ascend from 0.
Status QuantizeLowBit(const float* values, const int64_t* indices, int64_t k, DType dtype, Level level,
                      const Segments& segments, float* result);

// Writes LowBitSize bytes, all of which must be zero before the call. Returns InvalidArgument unless the values are a
// result of QuantizeLowBit.
Status WriteLowBit(const float* values, const int64_t* indices, int64_t k, DType dtype, const Segments& segments,
                   uint8_t* out);

// Decodes k values. Any bytes are valid.
void ReadLowBit(const uint8_t* section, const int64_t* indices, int64_t k, DType dtype, const Segments& segments,
                float* values);

}  // namespace hvd_sparse
