// A threshold that k of n magnitudes reach.
#pragma once

#include "dtype.h"
#include "parallel.h"
#include "status.h"

namespace hvd_sparse {

enum class ThresholdMethod { kExact, kSampled };

// An error unless k is in [1, n].
Status CheckCount(int64_t k, int64_t n);

struct ThresholdParams {
  int64_t k = 0;
  ThresholdMethod method = ThresholdMethod::kExact;
  double sample_fraction = 0.005;  // DGC, section 5: 0.1 % to 1 %
  uint64_t seed = 0;
};

// kExact: the k-th largest magnitude, by radix selection: three passes over float32, no copy of the data.
// kSampled: the same quantile of a stratified sample, one seeded random position in each of `s` equal strata,
// which no row or stride structure of the data can fool. NaN counts as magnitude 0.
Status SelectThreshold(const Array& values, const ThresholdParams& params, const ParallelFor& parallel_for,
                       double* threshold);

}  // namespace hvd_sparse
