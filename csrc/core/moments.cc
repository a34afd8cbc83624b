#include "moments.h"

#include <cmath>

#include "multiversion.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kLanes = 16;  // sums that do not wait for each other, so that they are made several at a time

HVD_SPARSE_MULTIVERSION void AddLanes(const float* values, int64_t n, double threshold, double* count, double* sum,
                                      double* squares) {
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double magnitude = std::fabs(static_cast<double>(values[i + lane]));
      const double reaches = magnitude >= threshold ? 1.0 : 0.0;
      const double excess = magnitude >= threshold ? magnitude - threshold : 0.0;
      count[lane] += reaches;
      sum[lane] += excess;
      squares[lane] += excess * excess;
    }
  }
}

}  // namespace

Moments TailMoments(const float* values, int64_t n, double threshold, bool logs) {
  double count[kLanes] = {};
  double sum[kLanes] = {};
  double squares[kLanes] = {};
  const int64_t whole = n / kLanes * kLanes;
  AddLanes(values, whole, threshold, count, sum, squares);
  Moments moments;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    moments.count += count[lane];
    moments.sum += sum[lane];
    moments.squares += squares[lane];
  }
  const auto add = [&](int64_t i, bool tail) {
    const double excess = std::fabs(static_cast<double>(values[i])) - threshold;
    if (!(excess >= 0)) return;
    if (tail) {
      moments.count += 1;
      moments.sum += excess;
      moments.squares += excess * excess;
    }
    if (logs && excess > 0) {
      moments.logs += std::log(excess);
      moments.positive += 1;
    }
  };
  for (int64_t i = logs ? 0 : whole; i < n; ++i) add(i, i >= whole);
  return moments;
}

}  // namespace hvd_sparse
