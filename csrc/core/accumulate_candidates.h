// Accumulation that also gathers candidates for a selection. It is not in accumulate.h because the CUDA kernels include
// that header and define candidates of a different type.
#pragma once

#include <vector>

#include "accumulate.h"
#include "candidates.h"
#include "parallel.h"

namespace hvd_sparse {

// Updates the error feedback of the parts, and gathers the elements of the joined residuals (n elements) that reach the
// threshold of `none`, which is an empty set of candidates.
Candidates<float> AccumulateCandidates(const std::vector<Part>& parts, int64_t n, const Candidates<float>& none,
                                       const ParallelFor& parallel_for, bool* finite);

}  // namespace hvd_sparse
