// What a parameter server does with its elements: applies an update, finds which have changed, and which differ most
// from what a worker has.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "select.h"
#include "status.h"

namespace hvd_sparse {

// Subtracts values[j] from parameters[indices[j]] of n, for `count` of them, which ascend. Writes what changed as
// marks.h has it: counts[BlockCount(n)], places[count]. InvalidArgument, and nothing is changed, if indices do not
// ascend in [0, n).
Status ApplyUpdate(const int64_t* indices, const float* values, int64_t count, float* parameters, int64_t n,
                   uint32_t* counts, uint16_t* places);

// SelectTopK of minuend[i] - subtrahend[i], in float32.
Status SelectTopKOfDifference(const float* minuend, const float* subtrahend, int64_t n, const SelectParams& params,
                              const ParallelFor& parallel_for, Selection* selection);

}  // namespace hvd_sparse
