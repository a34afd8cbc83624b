// Selects the k elements of largest magnitude, or all elements that reach a threshold.
#pragma once

#include <vector>

#include "dtype.h"
#include "parallel.h"
#include "status.h"

namespace hvd_sparse {

struct SelectParams {
  int64_t k = 0;
  // A guess at the threshold, such as the last step's, slightly lowered; 0: none. It changes the cost, never the
  // result. If slightly more than k elements reach it, one pass suffices.
  double threshold_hint = 0;
  uint64_t seed = 0;  // of the order of equal magnitudes, and of samples
};

struct Selection {
  std::vector<int64_t> indices;  // ascending
  double threshold = 0;          // the smallest selected magnitude
  // The number of elements found to reach the hint, or without a hint the sampled threshold. Exact up to 2k, else a
  // number >= 2k. Below k, the hint was too high, and the data was read again.
  int64_t passed = 0;
};

// Selects exactly k elements in this order: nonzero numbers by descending magnitude, equal ones by a seeded hash of the
// index, so that no position is preferred; then zeros and then NaN, by ascending index. The result depends only on
// (values, k, seed), not on the hint or the number of threads.
Status SelectTopK(const Array& values, const SelectParams& params, const ParallelFor& parallel_for,
                  Selection* selection);

// Selects all elements whose magnitude is at least `threshold` (>= 0), by ascending index. NaN is never selected.
Status FilterThreshold(const Array& values, double threshold, const ParallelFor& parallel_for,
                       std::vector<int64_t>* indices);

}  // namespace hvd_sparse
