// The accumulation that gathers candidates. Apart from accumulate.h, which kernels include: theirs are other
// candidates.
#pragma once

#include <vector>

#include "accumulate.h"
#include "candidates.h"
#include "parallel.h"

namespace hvd_sparse {

// Updates the memory of the parts, and gathers what reaches the bar of `none` in their residuals, joined: n elements.
Candidates<float> AccumulateCandidates(const std::vector<Part>& parts, int64_t n, const Candidates<float>& none,
                                       const ParallelFor& parallel_for, bool* finite);

}  // namespace hvd_sparse
