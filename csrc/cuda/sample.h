// Copies a stratified sample of runs of elements, the one that core/strata.h iterates over.
#pragma once

#include <cstdint>

#include "launch.h"

namespace hvd_sparse {

// Writes `count` runs of `run` consecutive elements, one run from each of as many strata, to `sample`. count is at most
// n / run.
cudaError_t sample_runs_launch(const float* values, int64_t n, int64_t count, int64_t run, uint64_t seed, float* sample,
                               cudaStream_t stream);

}  // namespace hvd_sparse
