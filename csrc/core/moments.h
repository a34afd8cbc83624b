// Moments of the magnitudes that reach a threshold, in one pass: what a distribution is fitted to.
#pragma once

#include <cstdint>

namespace hvd_sparse {

// Of |value| - threshold, float64, over the values whose magnitude reaches the threshold.
struct Moments {
  double count = 0;
  double sum = 0;
  double squares = 0;
  double logs = 0;      // over those that are above 0
  double positive = 0;  // how many these are
};

// The logarithms take most of the time: 0 in their place unless `logs`. NaN reaches no threshold.
Moments TailMoments(const float* values, int64_t n, double threshold, bool logs);

}  // namespace hvd_sparse
