// Computes a threshold from a distribution fitted to the magnitudes, in stages: SIDCo, Abdelmoniem et al., 2021,
// section 2.
#pragma once

#include <cstdint>

#include "strata.h"

namespace hvd_sparse {

// The distribution of the first stage. Later stages use the same one, except that Pareto follows gamma.
enum class Distribution { kExponential, kGamma, kPareto };

struct FitParams {
  int64_t stages = 0;  // 0: no fit
  Distribution distribution = Distribution::kExponential;
  uint64_t seed = 0;  // of the sample
};

struct Fit {
  double threshold = 0;
  bool is_misfit = false;  // the threshold should not be used
};

constexpr int64_t kFitRun = 16;  // elements sampled together: one cache line

// Returns the number of runs of kFitRun elements in a sample of n elements that represents the k largest well. A hash
// of the seed picks one run in each of as many strata. 0: the fit uses all elements.
int64_t FitRuns(int64_t n, int64_t k);

// Fits a threshold, at least 2^-149, that about n * density of the magnitudes of float32 values reach.
Fit FitTail(const float* values, int64_t n, double density, const FitParams& params);

constexpr int64_t kFitLanes = 16;  // independent partial sums, so that several are computed at a time

// Count, sum and sum of squares of |value| - threshold, over the values whose magnitude reaches the threshold. NaN does
// not reach any threshold.
struct FitMoments {
  double count[kFitLanes] = {};
  double sum[kFitLanes] = {};
  double squares[kFitLanes] = {};
};

// Fits a threshold that about k of n residual elements reach, from all elements or from a sample. A thread can use only
// one object at a time.
class FitSample {
 public:
  FitSample(int64_t n, int64_t k, const FitParams& params);

  // Reads the elements of the sample below `end`, while they are in a cache. `end` is n or a multiple of kFitRun.
  void Read(const float* residual, int64_t end);

  // Reads the rest of the sample, and fits.
  Fit Run(const float* residual);

 private:
  int64_t n_;
  int64_t k_;
  FitParams params_;
  int64_t runs_;
  Strata strata_;
  float* values_;
  int64_t next_ = 0;  // start of the next run
  int64_t read_ = 0;  // number of runs that have been read
  FitMoments first_;  // moments of all values in the sample, with threshold 0
};

}  // namespace hvd_sparse
