// Finds a threshold that k of n magnitudes reach.
#pragma once

#include "dtype.h"
#include "host_device.h"
#include "parallel.h"
#include "random.h"
#include "status.h"

namespace hvd_sparse {

enum class ThresholdMethod { kExact, kSampled };

// Returns InvalidArgument unless k is in [1, n].
Status CheckCount(int64_t k, int64_t n);

// Returns InvalidArgument unless the threshold is a number >= 0.
Status CheckThreshold(double threshold);

struct ThresholdParams {
  int64_t k = 0;
  ThresholdMethod method = ThresholdMethod::kExact;
  double sample_fraction = 0.005;  // DGC, section 5: 0.1 % to 1 %
  uint64_t seed = 0;
};

// kExact: the k-th largest magnitude, by radix selection, which reads float32 three times and copies no data. kSampled:
// the same quantile of a stratified sample, with one random position in each of several equal strata; regular patterns
// in the data, such as rows, do not bias it. NaN counts as magnitude 0.
Status SelectThreshold(const Array& values, const ThresholdParams& params, const ParallelFor& parallel_for,
                       double* threshold);

// A checked request: whether to use a sample, the number of elements to look at, and the rank of the threshold among
// their magnitudes, where rank 1 is the largest.
struct ThresholdPlan {
  bool is_sampled = false;
  int64_t size = 0;
  int64_t rank = 0;
};
Status PlanThreshold(int64_t n, const ThresholdParams& params, ThresholdPlan* plan);

// Returns the start of the j-th of `size` equal strata of n elements. The products need more than 64 bits.
HVD_SPARSE_HD inline int64_t StratumStart(int64_t n, int64_t size, int64_t j) {
  return static_cast<int64_t>(static_cast<__int128>(j) * n / size);
}

// Returns the position of the sample in the j-th stratum.
HVD_SPARSE_HD inline int64_t SamplePosition(int64_t n, int64_t size, uint64_t seed, int64_t j) {
  const int64_t start = StratumStart(n, size, j);
  const auto length = static_cast<uint64_t>(StratumStart(n, size, j + 1) - start);
  return start + static_cast<int64_t>(Hash(seed, static_cast<uint64_t>(j)) % length);
}

}  // namespace hvd_sparse
