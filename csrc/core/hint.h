// The last step's threshold as a guess at this step's, with the same rule as ThresholdHint in hvd_sparse/threshold.py.
// On CUDA these numbers stay on the device between steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host_device.h"

namespace hvd_sparse {

constexpr double kFirstMargin = 0.98;
constexpr double kLowestMargin = 0.5;
constexpr double kHighestMargin = 0.998;

// The three float64 elements of the tensor that stores a hint.
struct Hint {
  double threshold;
  double margin;
  double k;
};
static_assert(sizeof(Hint) == 3 * sizeof(double) && offsetof(Hint, k) == 2 * sizeof(double), "a row of the tensor");

// Returns the hint for a selection of k elements; 0 if there is none.
HVD_SPARSE_HD inline double HintFor(const Hint& hint, int64_t k) {
  return hint.k == static_cast<double>(k) ? hint.threshold * hint.margin : 0.0;
}

// Updates the hint after a selection. passed: the number of elements that reached the hint.
HVD_SPARSE_HD inline void LearnHint(Hint* hint, int64_t k, double threshold, int64_t passed) {
  if (HintFor(*hint, k) > 0.0) {
    if (passed < k) {
      const double lower = 1.0 - 2.0 * (1.0 - hint->margin);
      hint->margin = lower > kLowestMargin ? lower : kLowestMargin;
    } else if (passed > k + k / 4 + 16) {
      const double higher = 1.0 - 0.9 * (1.0 - hint->margin);
      hint->margin = higher < kHighestMargin ? higher : kHighestMargin;
    }
  }
  hint->threshold = threshold;
  hint->k = static_cast<double>(k);
}

}  // namespace hvd_sparse
