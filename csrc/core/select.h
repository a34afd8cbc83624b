// Indices and values over a threshold; exactly k of largest magnitude.
#pragma once

#include <vector>

#include "dtype.h"
#include "parallel.h"
#include "status.h"

namespace hvd_sparse {

struct SelectParams {
  int64_t k = 0;
  // A guess at the threshold, say last step's taken slightly low: it changes the cost, never the result.
  // 0 means none. Good: a little over k elements reach it, and one pass suffices.
  double threshold_hint = 0;
  uint64_t seed = 0;  // breaks ties of equal magnitudes, and places the samples
};

struct Selection {
  std::vector<int64_t> indices;  // ascending
  double threshold = 0;          // the smallest selected magnitude
  // How many elements were found to reach the hint (or the sampled threshold where there was no hint): all of them up
  // to 2k, at least 2k of more. Below k the hint was too high, and the data were read again.
  int64_t passed = 0;
};

// Exactly k, in a total order: larger magnitude first; equal magnitudes by a seeded hash of the index, so that
// position never decides; zeros last but for NaN, lowest index first. The result is a function of (values, k, seed)
// alone: the same for every hint and every number of threads.
Status SelectTopK(const Array& values, const SelectParams& params, const ParallelFor& parallel_for,
                  Selection* selection);

// All elements whose magnitude is at least `threshold` (>= 0), in ascending order; NaN never passes.
Status FilterThreshold(const Array& values, double threshold, const ParallelFor& parallel_for,
                       std::vector<int64_t>* indices);

}  // namespace hvd_sparse
