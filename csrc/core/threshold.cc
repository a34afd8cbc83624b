#include "threshold.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "selection_key.h"
#include "strata.h"

namespace hvd_sparse {
namespace {

// NaN counts as zero.
template <typename T>
inline BitsOf<T> OrderedBits(T value) {
  const BitsOf<T> bits = MagnitudeBits(value);
  return bits <= kInfinityBits<T> ? bits : 0;
}

// Counts the digit at `shift` of every element whose higher digits are those of `prefix`.
template <typename T>
std::vector<int64_t> Histogram(const T* data, int64_t n, int shift, BitsOf<T> prefix, const ParallelFor& parallel_for) {
  constexpr uint64_t kDigitMask = (uint64_t{1} << kDigitBits) - 1;
  const auto above = prefix >> shift >> kDigitBits;
  std::vector<int64_t> total(size_t{1} << kDigitBits, 0);
  std::mutex mutex;
  parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> local(size_t{1} << kDigitBits, 0);
    for (int64_t i = begin; i < end; ++i) {
      const auto bits = OrderedBits(data[i]);
      if ((bits >> shift >> kDigitBits) == above) ++local[(bits >> shift) & kDigitMask];
    }
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t digit = 0; digit < total.size(); ++digit) total[digit] += local[digit];
  });
  return total;
}

template <typename T>
double ExactThreshold(const T* data, int64_t n, int64_t k, const ParallelFor& parallel_for) {
  using Bits = BitsOf<T>;
  Bits prefix = 0;
  int64_t rank = k;  // of the threshold among the magnitudes that share the prefix
  for (int shift = static_cast<int>(sizeof(Bits) * 8 + kDigitBits - 1) / kDigitBits * kDigitBits; shift > 0;) {
    shift -= kDigitBits;
    const std::vector<int64_t> counts = Histogram<T>(data, n, shift, prefix, parallel_for);
    size_t digit = counts.size() - 1;
    while (rank > counts[digit]) rank -= counts[digit--];
    prefix = static_cast<Bits>(prefix | static_cast<Bits>(digit) << shift);
  }
  return MagnitudeFromBits(T{}, prefix);
}

int64_t SampleSize(int64_t n, const ThresholdParams& params) {
  constexpr int64_t kTailSamples = 32;  // with fewer samples in the tail, the estimate is unreliable
  constexpr int64_t kSmallest = 1024;
  const auto fraction = static_cast<int64_t>(std::ceil(params.sample_fraction * static_cast<double>(n)));
  const int64_t tail = static_cast<int64_t>((static_cast<__int128>(kTailSamples) * n + params.k - 1) / params.k);
  return std::min(n, std::max({fraction, tail, kSmallest}));
}

template <typename T>
double SampledThreshold(const T* data, int64_t n, const ThresholdPlan& plan, uint64_t seed) {
  std::vector<BitsOf<T>> sample(static_cast<size_t>(plan.size));
  Strata strata(n, plan.size, seed);
  for (BitsOf<T>& bits : sample) bits = OrderedBits(data[strata.Next()]);
  std::nth_element(sample.begin(), sample.begin() + (plan.rank - 1), sample.end(), std::greater<>());
  return MagnitudeFromBits(T{}, sample[static_cast<size_t>(plan.rank - 1)]);
}

}  // namespace

Status CheckCount(int64_t k, int64_t n) {
  if (k >= 1 && k <= n) return Status::Ok();
  return Status::InvalidArgument("k must be in [1, " + std::to_string(n) + "], the number of values; got " +
                                 std::to_string(k));
}

Status CheckThreshold(double threshold) {
  if (threshold >= 0) return Status::Ok();
  return Status::InvalidArgument("threshold must be a number >= 0, got " + std::to_string(threshold));
}

Status PlanThreshold(int64_t n, const ThresholdParams& params, ThresholdPlan* plan) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckCount(params.k, n));
  if (!(params.sample_fraction > 0 && params.sample_fraction <= 1)) {
    return Status::InvalidArgument("sample_fraction must be in (0, 1], got " + std::to_string(params.sample_fraction));
  }
  const int64_t size = SampleSize(n, params);
  if (params.method == ThresholdMethod::kExact || 2 * size >= n) {
    *plan = {false, n, params.k};
    return Status::Ok();
  }
  const auto wide = (2 * static_cast<__int128>(params.k) * size + n) / (2 * static_cast<__int128>(n));
  *plan = {true, size, std::max<int64_t>(1, static_cast<int64_t>(wide))};
  return Status::Ok();
}

Status SelectThreshold(const Array& values, const ThresholdParams& params, const ParallelFor& parallel_for,
                       double* threshold) {
  ThresholdPlan plan;
  HVD_SPARSE_RETURN_IF_ERROR(PlanThreshold(values.size, params, &plan));
  *threshold = Dispatch(values, [&](const auto* data) {
    return plan.is_sampled ? SampledThreshold(data, values.size, plan, params.seed)
                           : ExactThreshold(data, values.size, params.k, parallel_for);
  });
  return Status::Ok();
}

}  // namespace hvd_sparse
