#include "fit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "expect.h"
#include "strata.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

using Floats = std::vector<float>;

#define EXPECT_NEAR(expected, received, part, context)                     \
  EXPECT(std::abs((received) - (expected)) <= (part) * std::abs(expected), \
         context << ": " << (received) << ", expected " << (expected))

Fit FitAll(const float* values, int64_t n, double density, const FitParams& params) {
  FitScratch scratch;
  return FitTail(values, n, density, params, &scratch);
}

Floats Draw(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<size_t>(n));
  for (float& value : values) value = normal(random);
  return values;
}

TEST(StrataAreSamplePositions) {
  for (const int64_t n : {1, 2, 7, 64, 1000, 12345}) {
    for (const int64_t size : {1, 2, 3, 63, 999}) {
      if (size > n) continue;
      Strata strata(n, size, 5);
      for (int64_t j = 0; j < size; ++j) {
        EXPECT_EQ(SamplePosition(n, size, 5, j), strata.Next(), n << " in " << size << ", " << j);
      }
    }
  }
  const int64_t n = (int64_t{1} << 48) - 1;
  Strata strata(n, 1000, ~uint64_t{0});
  for (int64_t j = 0; j < 1000; ++j) EXPECT_EQ(SamplePosition(n, 1000, ~uint64_t{0}, j), strata.Next(), j);
}

// Mean excess, mean square and mean logarithm of the magnitudes above a threshold, in long double.
struct Means {
  long double count = 0, mean = 0, square = 0, log = 0;
};

Means MeansOf(const Floats& values, long double threshold) {
  Means means;
  for (const float value : values) {
    const long double excess = std::fabs(static_cast<long double>(value)) - threshold;
    if (excess < 0) continue;
    ++means.count;
    means.mean += excess;
    means.square += excess * excess;
    means.log += excess > 0 ? std::log(excess) : 0;
  }
  means.mean /= means.count;
  means.square /= means.count;
  means.log /= means.count;
  return means;
}

long double ParetoExcess(const Means& means, long double density) {
  const long double ratio = means.mean * means.mean / (means.square - means.mean * means.mean);
  const long double shape = (1 - ratio) / 2;
  return means.mean * (ratio + 1) / 2 / shape * (std::pow(density, -shape) - 1);
}

// 16 samples make whole lanes, one more or less do not.
TEST(FitsByTheFormulasOfThePaper) {
  for (const int64_t n : {5, 15, 16, 17, 64, 79, 1000, 70'001}) {
    const Floats values = Draw(n, static_cast<uint64_t>(n));
    const long double density = 0.1L, later = std::sqrt(density / 0.25L);
    const Means all = MeansOf(values, 0);
    const long double once = -all.mean * std::log(density);
    EXPECT_NEAR(static_cast<double>(once), FitAll(values.data(), n, 0.1, {1}).threshold, 1e-12, "exponential, " << n);
    const long double s = std::log(all.mean) - all.log;
    const long double shape = (3 - s + std::sqrt((s - 3) * (s - 3) + 24 * s)) / (12 * s);
    const long double gamma = -all.mean / shape * (std::log(density) + std::lgamma(shape));
    EXPECT_NEAR(static_cast<double>(gamma), FitAll(values.data(), n, 0.1, {1, Distribution::kGamma}).threshold, 1e-11,
                "gamma, " << n);
    EXPECT_NEAR(static_cast<double>(ParetoExcess(all, density)),
                FitAll(values.data(), n, 0.1, {1, Distribution::kPareto}).threshold, 1e-11, "Pareto, " << n);
    if (n < 1000) continue;
    long double staged = ParetoExcess(all, 0.25L);
    for (int stage = 1; stage < 3; ++stage) staged += ParetoExcess(MeansOf(values, staged), later);
    const Fit fit = FitAll(values.data(), n, 0.1, {3, Distribution::kPareto});
    EXPECT_NEAR(static_cast<double>(staged), fit.threshold, 1e-11, "three stages, " << n);
  }
}

TEST(ZerosAreNoPartOfAGammaDistribution) {
  const Floats values = Draw(1000, 3);
  Floats with_zeros(4000, 0.0f);
  for (size_t i = 0; i < values.size(); ++i) with_zeros[3 * i] = values[i];
  const FitParams gamma{1, Distribution::kGamma};
  EXPECT_NEAR(FitAll(values.data(), 1000, 0.04, gamma).threshold,
              FitAll(with_zeros.data(), 4000, 0.01, gamma).threshold, 1e-9, "three quarters are zeros");
  EXPECT(FitAll(with_zeros.data(), 4000, 0.5, gamma).threshold <= std::ldexp(1.0, -149), "more than there are");
}

TEST(OddValuesGiveAThresholdAllTheSame) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<Floats> odd{{0},        {0, 0, 0}, {1, 1, 1, 1},       {nan},
                                {1e-45f},   {0, nan},  {1e30f, 1e-30f},    Floats(100, 2.0f),
                                {3e38f, 0}, {-1, 1},   {1e-40f, 2e-40f, 0}};
  for (const Floats& values : odd) {
    for (const int64_t stages : {1, 3}) {
      for (const auto kind : {Distribution::kExponential, Distribution::kGamma, Distribution::kPareto}) {
        const Fit fit = FitAll(values.data(), static_cast<int64_t>(values.size()), 0.1, {stages, kind});
        EXPECT(fit.threshold >= std::ldexp(1.0, -149) && fit.threshold < HUGE_VAL, values[0] << ", " << fit.threshold);
      }
    }
  }
  EXPECT(FitAll(odd[7].data(), 100, 0.1, {1}).is_misfit, "all equal, none of which reaches it");
  EXPECT(!FitAll(odd[1].data(), 3, 0.1, {1}).is_misfit, "zeros");
}

TEST(ASampleHasARunOfEachStratum) {
  for (const int64_t n : {1, 5, 16, 1000, 400'007}) {
    const Floats residual = Draw(n, 2);
    const int64_t k = std::max<int64_t>(1, n / 100), runs = FitRuns(n, k);
    Floats sampled;
    EXPECT_EQ(n > 1000, runs > 0, n);
    for (int64_t j = 0; j < runs; ++j) {
      const float* run = residual.data() + SamplePosition(n / kFitRun, runs, 9, j) * kFitRun;
      sampled.insert(sampled.end(), run, run + kFitRun);
    }
    if (runs == 0) sampled = residual;
    const FitParams params{2, Distribution::kExponential, 9};
    FitScratch scratch;
    FitSample sample(n, k, params, &scratch);
    for (int64_t end = 0; end < n; end += 65'536) sample.Read(residual.data(), end);
    const Fit found = sample.Run(residual.data());
    const double density = static_cast<double>(k) / static_cast<double>(n);
    const Fit wanted = FitAll(sampled.data(), static_cast<int64_t>(sampled.size()), density, params);
    EXPECT_NEAR(wanted.threshold, found.threshold, 1e-12, n);
  }
}

}  // namespace
}  // namespace hvd_sparse
