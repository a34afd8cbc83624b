// A threshold from a distribution that is fitted to magnitudes, in stages: SIDCo, Abdelmoniem et al., 2021, section 2.
#pragma once

#include <cstdint>

#include "strata.h"

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

constexpr int64_t kFitLanes = 16;  // sums that do not wait for each other, so that they are made several at a time

// Of |value| - threshold, over the values whose magnitude reaches the threshold. NaN reaches none.
struct FitMoments {
  double count[kFitLanes] = {};
  double sum[kFitLanes] = {};
  double squares[kFitLanes] = {};
};

// The same of a residual, or of a sample of it, so that about k of n elements reach the threshold. One at a time in a
// thread.
class FitSample {
 public:
  FitSample(int64_t n, int64_t k, const FitParams& params);

  // Reads what of the sample lies below `end`, a multiple of kFitRun or n, while a cache holds it.
  void Read(const float* residual, int64_t end);

  // Reads the rest, and fits.
  Fit Run(const float* residual);

 private:
  int64_t n_;
  int64_t k_;
  FitParams params_;
  int64_t runs_;
  Strata strata_;
  float* values_;
  int64_t next_ = 0;  // where the next run begins
  int64_t read_ = 0;  // runs
  FitMoments first_;  // of all values, without a threshold
};

}  // namespace hvd_sparse
