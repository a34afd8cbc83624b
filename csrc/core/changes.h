// A parameter server's updates, and its selection of the elements that differ most from a worker's.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "select.h"
#include "status.h"

namespace hvd_sparse {

// Subtracts values[j] from parameters[indices[j]], for count ascending indices. Writes the changed elements in the form
// of `Changed` (marks.h): counts[BlockCount(n)], places[count]. Returns InvalidArgument, and changes nothing, unless
// indices ascend in [0, n).
Status ApplyUpdate(const int64_t* indices, const float* values, int64_t count, float* parameters, int64_t n,
                   uint32_t* counts, uint16_t* places);

// Calls SelectTopK on the differences minuend[i] - subtrahend[i], in float32.
Status SelectTopKOfDifference(const float* minuend, const float* subtrahend, int64_t n, const SelectParams& params,
                              const ParallelFor& parallel_for, Selection* selection);

}  // namespace hvd_sparse
