// Values on the wire in 2 bits or 1: a sign, and which of one or two magnitudes (Gradient Dropping, section 5.4).
//
// int1 sends an element as its sign and its group's level. int2 has two levels a group, and a bit that tells
// small values, below the mean magnitude of the group, from large ones. Zeros count in no level, and are sent as the
// smaller. The first level is the smaller one; where all magnitudes of a group are equal, both are that, and all have
// the first.
#pragma once

#include <vector>

#include "dtype.h"
#include "status.h"

namespace hvd_sparse {

// The elements from `begin` to the next segment are a matrix, row after row, whose columns are so many channels: each
// is a group.
struct Segment {
  int64_t begin;
  int64_t channels;
};
using Segments = std::vector<Segment>;  // empty: all elements are one group

enum class Level { kMean, kMin };  // of the magnitudes

inline bool IsLowBit(DType dtype) { return dtype == DType::kInt2 || dtype == DType::kInt1; }

// InvalidArgument unless the segments begin at 0, ascend below n, and have 1 to as many channels as elements.
Status CheckSegments(const Segments& segments, int64_t n);

// What k values take: float32 levels, as many as groups could be met, then the codes. Little-endian, as all payloads.
int64_t LowBitSize(DType dtype, int64_t k, const Segments& segments);

// The values, of elements at the ascending `indices`, as they will be decoded. result[k] may be values. Without
// segments the indices are not read; with them, InvalidArgument unless they ascend from 0 and the segments' begins too.
Status QuantizeLowBit(const float* values, const int64_t* indices, int64_t k, DType dtype, Level level,
                      const Segments& segments, float* result);

// Writes LowBitSize bytes, of which all were zero. InvalidArgument unless QuantizeLowBit made the values.
Status WriteLowBit(const float* values, const int64_t* indices, int64_t k, DType dtype, const Segments& segments,
                   uint8_t* out);

// Any bytes will do.
void ReadLowBit(const uint8_t* section, const int64_t* indices, int64_t k, DType dtype, const Segments& segments,
                float* values);

}  // namespace hvd_sparse
