// A threshold from a distribution that is fitted to magnitudes, in stages: SIDCo, Abdelmoniem et al., 2021, section 2.
#pragma once

#include <cstdint>

#include "accumulate.h"
#include "parallel.h"

namespace hvd_sparse {

enum class Distribution { kExponential, kGamma, kPareto };  // of the first stage; gamma is followed by Pareto

struct FitParams {
  int64_t stages = 0;  // 0: nothing is fitted
  Distribution distribution = Distribution::kExponential;
  uint64_t seed = 0;  // of the sample
};

struct Fit {
  double threshold = 0;
  double ratio = 0;        // how many of the sample reach it, over how many should
  bool is_misfit = false;  // the fit is of no use
};

constexpr int64_t kFitRun = 16;  // elements that are sampled together: a line of the cache

// Which runs of kFitRun of n elements are fitted to, so that k of n are well met: one of each of so many strata, by a
// hash of the seed; 0: to all elements.
int64_t FitRuns(int64_t n, int64_t k);

// Fits to the magnitudes of float32 values, so that a part `density` of them reaches the threshold, at least 2^-149.
Fit FitTail(const float* values, int64_t n, double density, const FitParams& params);

// Fits to what the residual of a part will be once its gradient is accumulated, without momentum or weight decay, or if
// nothing is to be accumulated, to what it is. k: how many should reach the threshold. Where it
// has to read all of the residual it accumulates first: is_done, as where nothing is to be.
Fit FitPart(const Part& part, int64_t k, const FitParams& params, bool active, const ParallelFor& parallel_for,
            bool* is_done, bool* finite);

}  // namespace hvd_sparse
