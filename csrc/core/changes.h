// What a parameter server does with its elements: applies an update, finds which have changed, and which differ most
// from what a worker has.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "select.h"
#include "status.h"

namespace hvd_sparse {

// Elements of a server, and the time at which each changed last.
struct Elements {
  float* parameters;
  uint32_t* clocks;
  int64_t n;
};

// Subtracts values[j] from the parameter at indices[j] and sets its clock, for `count` of them. InvalidArgument, and
// nothing is changed, if an index is none of [0, n).
Status ApplyUpdate(const int64_t* indices, const float* values, int64_t count, uint32_t clock,
                   const Elements& elements);

// Writes the ascending indices of the clocks that are above `after`; returns how many. Room for n.
int64_t ChangedAfter(const uint32_t* clocks, int64_t n, uint32_t after, int64_t* indices);

// SelectTopK of minuend[i] - subtrahend[i], in float32.
Status SelectTopKOfDifference(const float* minuend, const float* subtrahend, int64_t n, const SelectParams& params,
                              const ParallelFor& parallel_for, Selection* selection);

}  // namespace hvd_sparse
