// Computes a threshold from a distribution fitted to the magnitudes, in stages: SIDCo, Abdelmoniem et al., 2021,
// section 2.
#pragma once

#include <cstdint>
#include <memory>

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

// An array that grows when more room is asked for, without keeping its content. It is not a vector, which would write
// zeros to memory that is often not used.
class ReusedArray {
 public:
  // Returns room for n values. The address is valid until the next call.
  float* Room(int64_t n);

 private:
  std::unique_ptr<float[]> memory_;
  int64_t size_ = 0;
};

// The memory of a fit. A caller that fits many tensors keeps it, because new memory for each would be mapped each time.
// Only one fit at a time can use it.
struct FitScratch {
  ReusedArray sample;    // the sample of a FitSample
  ReusedArray reaching;  // the values that reached the threshold of the last stage
};

// Fits a threshold, at least 2^-149, that about n * density of the magnitudes of float32 values reach.
Fit FitTail(const float* values, int64_t n, double density, const FitParams& params, FitScratch* scratch);

constexpr int64_t kFitLanes = 16;  // independent partial sums, so that several are computed at a time

// Count, sum and sum of squares of |value| - threshold, over the values whose magnitude reaches the threshold. NaN does
// not reach any threshold.
struct FitMoments {
  double count[kFitLanes] = {};
  double sum[kFitLanes] = {};
  double squares[kFitLanes] = {};
};

// Fits a threshold that about k of n residual elements reach, from all elements or from a sample.
class FitSample {
 public:
  // `scratch` must outlive this object, which alone may use it.
  FitSample(int64_t n, int64_t k, const FitParams& params, FitScratch* scratch);

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
  FitScratch* scratch_;
  float* values_;     // the sample, in `scratch_`
  int64_t next_ = 0;  // start of the next run
  int64_t read_ = 0;  // number of runs that have been read
  FitMoments first_;  // moments of all values in the sample, with threshold 0
};

}  // namespace hvd_sparse
