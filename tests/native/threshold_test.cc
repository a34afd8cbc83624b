#include "threshold.h"

#include <algorithm>
#include <functional>
#include <set>
#include <vector>

#include "arrays.h"
#include "cuts.h"
#include "expect.h"

namespace hvd_sparse {
namespace {

// |values| with NaN as 0, largest first.
std::vector<double> Descending(const Values& values) {
  std::vector<double> magnitudes;
  for (int64_t i = 0; i < values.size(); ++i) {
    magnitudes.push_back(std::isnan(values.At(i)) ? 0.0 : values.Magnitude(i));
  }
  std::sort(magnitudes.begin(), magnitudes.end(), std::greater<>());
  return magnitudes;
}

std::set<int64_t> SomeCounts(int64_t n) {
  std::set<int64_t> ks{1, 2, n / 1000, n / 100, n / 2, n - 1, n};
  ks.erase(ks.begin(), ks.lower_bound(1));
  ks.erase(ks.upper_bound(n), ks.end());
  return ks;
}

double ThresholdOf(const Values& values, const ThresholdParams& params, const ParallelFor& parallel_for) {
  double threshold = -1;
  EXPECT_STATUS(StatusKind::kOk, SelectThreshold(values.array(), params, parallel_for, &threshold), "k = " << params.k);
  return threshold;
}

TEST(ExactIsTheKthLargest) {
  for (const DType dtype : kDTypes) {
    for (const Pattern pattern : kPatterns) {
      for (const int64_t n : {1, 2, 3, 64, 1001, 65535, 65536, 65537, 131072}) {
        if (!expect::Chosen(3)) continue;
        const Values values = Draw(dtype, pattern, n, static_cast<uint64_t>(n));
        const std::vector<double> sorted = Descending(values);
        for (const int64_t k : SomeCounts(n)) {
          const Cut& cut = AllCuts()[static_cast<size_t>(k + n) % AllCuts().size()];
          EXPECT_EQ(sorted[static_cast<size_t>(k - 1)], ThresholdOf(values, {k}, cut.run),
                    Name(dtype) << ", " << Name(pattern) << ", n = " << n << ", k = " << k << ", " << cut.name);
        }
      }
    }
  }
}

TEST(SampledOfAFewIsExact) {
  for (const DType dtype : kDTypes) {
    for (const int64_t n : {1, 5, 2000}) {
      const Values values = Draw(dtype, Pattern::kMixed, n, 4);
      const std::vector<double> sorted = Descending(values);
      for (const int64_t k : SomeCounts(n)) {
        const ThresholdParams params{k, ThresholdMethod::kSampled, 0.005, 9};
        EXPECT_EQ(sorted[static_cast<size_t>(k - 1)], ThresholdOf(values, params, SerialFor),
                  "n = " << n << ", k = " << k);
      }
    }
  }
  const Values values = Draw(DType::kFloat32, Pattern::kSpread, 131072, 4);
  const ThresholdParams all{77, ThresholdMethod::kSampled, 1.0, 9};
  EXPECT_EQ(Descending(values)[76], ThresholdOf(values, all, SerialFor), "a sample of everything");
}

// How many reach a sampled threshold; it must be one of the magnitudes.
int64_t ReachedBySampled(const Values& values, const std::vector<double>& sorted, const ThresholdParams& params) {
  const double threshold = ThresholdOf(values, params, SerialFor);
  for (const Cut& cut : AllCuts()) EXPECT_EQ(threshold, ThresholdOf(values, params, cut.run), cut.name);
  const auto past = std::upper_bound(sorted.begin(), sorted.end(), threshold, std::greater<>());
  EXPECT(past != sorted.begin() && *(past - 1) == threshold, threshold << " is no magnitude of the data");
  return past - sorted.begin();
}

TEST(SampledIsNearTheQuantile) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const Values values = Draw(dtype, Pattern::kSpread, 400000, 6);
    const std::vector<double> sorted = Descending(values);
    for (const int64_t k : {400, 4000, 40000}) {
      std::set<int64_t> seen;
      for (uint64_t seed = 0; seed < 20; ++seed) {
        const int64_t reached = ReachedBySampled(values, sorted, {k, ThresholdMethod::kSampled, 0.01, seed});
        // 32 samples or more in the tail: a standard deviation of 18 % or less.
        EXPECT(reached > k / 3 && reached < 2 * k, reached << " reach it for k = " << k << ", seed " << seed);
        seen.insert(reached);
      }
      EXPECT(seen.size() > 10, "seeds sample different elements; " << seen.size() << " thresholds of 20");
    }
  }
}

TEST(SampledIsNotFooledByRowsAndStrides) {
  constexpr int64_t kSize = 262144, kLarge = 4096;
  for (const int64_t stride :
       {64, 100, 128, 200, 256, 1024}) {  // one large element a stride, always in the same column
    Values values(DType::kFloat32, kSize);
    std::mt19937_64 random(static_cast<uint64_t>(stride));
    for (int64_t i = 0; i < kSize; ++i) {
      values.Set(i, DrawBits(DType::kFloat32, Pattern::kDenormals, i, kSize, random));
      if (i % stride == stride / 2) values.Set(i, 0x3f800000u + static_cast<uint32_t>(random() % 8000000));
    }
    const std::vector<double> sorted = Descending(values);
    const int64_t k = std::min(kLarge, kSize / stride) / 2;
    const int64_t reached = ReachedBySampled(values, sorted, {k, ThresholdMethod::kSampled, 0.005, 1});
    EXPECT(reached > k / 3 && reached < 2 * k, reached << " reach it for k = " << k << ", stride " << stride);
  }
}

TEST(SampledCountsNanAsZero) {
  for (const Pattern pattern : {Pattern::kNan, Pattern::kZeros}) {
    for (const DType dtype : kDTypes) {
      const Values values = Draw(dtype, pattern, 100001, 3);
      EXPECT_EQ(0.0, ThresholdOf(values, {1000, ThresholdMethod::kSampled, 0.005, 2}, SerialFor), Name(dtype));
    }
  }
}

TEST(RefusesWhatCannotBe) {
  const Values values = Draw(DType::kFloat32, Pattern::kSpread, 10, 1);
  const Values none(DType::kFloat32, 0);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  double threshold = 7;
  for (const int64_t k : {int64_t{0}, int64_t{-1}, int64_t{11}, std::numeric_limits<int64_t>::max(),
                          std::numeric_limits<int64_t>::min()}) {
    EXPECT_STATUS(StatusKind::kInvalidArgument, SelectThreshold(values.array(), {k}, SerialFor, &threshold), k);
  }
  EXPECT_STATUS(StatusKind::kInvalidArgument, SelectThreshold(none.array(), {1}, SerialFor, &threshold), "of none");
  EXPECT_STATUS(StatusKind::kInvalidArgument, SelectThreshold(none.array(), {0}, SerialFor, &threshold),
                "none of none");
  for (const double fraction : {0.0, -0.1, 1.0001, nan}) {
    const ThresholdParams params{1, ThresholdMethod::kSampled, fraction, 0};
    EXPECT_STATUS(StatusKind::kInvalidArgument, SelectThreshold(values.array(), params, SerialFor, &threshold),
                  fraction);
  }
  EXPECT_EQ(7.0, threshold, "untouched");
}

}  // namespace
}  // namespace hvd_sparse
