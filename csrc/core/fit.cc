#include "fit.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "candidates.h"
#include "multiversion.h"
#include "strata.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

constexpr double kFirstDensity = 0.25;  // fraction kept by the first of several stages; the others keep equal fractions
// A fit is rejected if more than this many times the wanted number and more than half of all elements reach its
// threshold.
constexpr int64_t kMost = 4;
constexpr int64_t kSmallestSample = int64_t{1} << 16;
constexpr int64_t kExpected = 64;  // expected number of the k largest elements in a sample
constexpr int64_t kLanes = kFitLanes;

double Total(const double* lanes) {
  double total = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
}

// Compiler vectors for half of the lanes each. The compiler would load and store sums in arrays in each iteration.
constexpr int64_t kHalf = kLanes / 2;
typedef float Floats __attribute__((vector_size(kHalf * sizeof(float))));
typedef double Doubles __attribute__((vector_size(kHalf * sizeof(double))));

// Adds the moments of the values. n must be a multiple of kLanes.
HVD_SPARSE_MULTIVERSION void AddLanes(const float* values, int64_t n, double threshold, double* count, double* sum,
                                      double* squares) {
  for (int64_t half = 0; half < kLanes; half += kHalf) {
    Doubles counts, sums, products;
    const Doubles zeros = {}, ones = zeros + 1.0;
    std::memcpy(&counts, count + half, sizeof counts);
    std::memcpy(&sums, sum + half, sizeof sums);
    std::memcpy(&products, squares + half, sizeof products);
    for (int64_t i = half; i < n; i += kLanes) {
      Floats loaded;
      std::memcpy(&loaded, values + i, sizeof loaded);
      const Doubles value = __builtin_convertvector(loaded, Doubles);
      const Doubles magnitude = value < zeros ? -value : value;
      const auto reaches = magnitude >= threshold;
      const Doubles excess = reaches ? magnitude - threshold : zeros;
      counts += reaches ? ones : zeros;
      sums += excess;
      products += excess * excess;
    }
    std::memcpy(count + half, &counts, sizeof counts);
    std::memcpy(sum + half, &sums, sizeof sums);
    std::memcpy(squares + half, &products, sizeof products);
  }
}

void AddMoments(const float* values, int64_t n, double threshold, FitMoments* moments) {
  constexpr int64_t kSpan = 4096;  // what a cache holds: it is read twice
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kSpan) {
    AddLanes(values + i, std::min(kSpan, whole - i), threshold, moments->count, moments->sum, moments->squares);
  }
  if (whole == n) return;
  float rest[kLanes];
  std::fill(std::begin(rest), std::end(rest), std::nanf(""));
  std::copy(values + whole, values + n, rest);
  AddLanes(rest, kLanes, threshold, moments->count, moments->sum, moments->squares);
}

// Adds the logarithms of the nonzero magnitudes, and counts these. Four magnitudes are multiplied before their exponent
// is moved to `exponent`, so that no product overflows. n must be a multiple of kLanes.
HVD_SPARSE_MULTIVERSION void AddLogs(const float* values, int64_t n, double* product, int64_t* exponent,
                                     double* positive) {
  constexpr uint64_t kOne = 0x3ff0000000000000ull;
  constexpr int64_t kFactors = 4;
  for (int64_t i = 0; i < n; i += kLanes * kFactors) {
    const int64_t end = i + kLanes * kFactors < n ? i + kLanes * kFactors : n;
    for (int64_t j = i; j < end; j += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const double magnitude = std::fabs(static_cast<double>(values[j + lane]));
        product[lane] *= magnitude > 0 ? magnitude : 1.0;
        positive[lane] += magnitude > 0 ? 1.0 : 0.0;
      }
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      uint64_t bits;
      std::memcpy(&bits, product + lane, sizeof bits);
      exponent[lane] += static_cast<int64_t>(bits >> 52) - 1023;
      bits = (bits & 0x000fffffffffffffull) | kOne;
      std::memcpy(product + lane, &bits, sizeof bits);
    }
  }
}

// The sum of the logarithms of the values above 0, and their number.
struct Logs {
  double sum;
  double positive;
};

Logs SumLogs(const float* values, int64_t n) {
  double product[kLanes];
  double positive[kLanes] = {};
  int64_t exponent[kLanes] = {};
  std::fill(std::begin(product), std::end(product), 1.0);
  const int64_t whole = n / kLanes * kLanes;
  AddLogs(values, whole, product, exponent, positive);
  float rest[kLanes] = {};
  std::copy(values + whole, values + n, rest);
  AddLogs(rest, kLanes, product, exponent, positive);
  double logs = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    logs += std::log(product[lane]) + static_cast<double>(exponent[lane]) * 0.69314718055994530942;
  }
  return {logs, Total(positive)};
}

// Copies the magnitudes that reach the threshold `bar`, which are few, to the front of `kept`, and returns their
// number. `kept` may be `values`.
HVD_SPARSE_MULTIVERSION int64_t Keep(const float* values, int64_t n, uint32_t bar, float* kept) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t size = kLanes < n - i ? kLanes : n - i;
    if (size == kLanes && !AnyReaches(values + i, kLanes, bar)) continue;
    for (int64_t j = i; j < i + size; ++j) {
      const uint32_t bits = MagnitudeBits(values[j]);
      kept[count] = BitsToFloat(bits);
      count += Reaches<float>(bits, bar);
    }
  }
  return count;
}

// The quantile of a gamma distribution: Minka's closed form of the shape, and the first term of the tail
// (Corollary 1.2).
double GammaQuantile(double mean, double mean_log, double density) {
  const double s = std::log(mean) - mean_log;
  if (!(s > 0)) return mean;  // all of these magnitudes are equal
  const double shape = (3 - s + std::sqrt((s - 3) * (s - 3) + 24 * s)) / (12 * s);
  int sign = 0;
  return std::max(0.0, -mean / shape * (std::log(density) + lgamma_r(shape, &sign)));
}

// The quantile of a generalised Pareto distribution with these moments (Corollary 1.3).
double ParetoQuantile(double mean, double variance, double density) {
  if (!(variance > 0)) return mean;  // all magnitudes are equal
  const double ratio = mean * mean / variance;
  const double shape = 0.5 * (1 - ratio);
  const double scale = 0.5 * mean * (ratio + 1);
  if (std::abs(shape) < 1e-9) return -scale * std::log(density);  // an exponential distribution
  return scale / shape * (std::pow(density, -shape) - 1);
}

// Returns the value that a fraction `density` of the fitted distribution exceeds.
double Quantile(const FitMoments& moments, const float* values, int64_t n, double density, Distribution kind) {
  const double count = Total(moments.count);
  const double mean = count > 0 ? Total(moments.sum) / count : 0;
  if (!(mean > 0 && mean < HUGE_VAL)) return 0;
  switch (kind) {
    case Distribution::kGamma: {  // it has no zeros: fitted to the values above 0
      const Logs logs = SumLogs(values, n);
      const double wanted = density * count / logs.positive;
      return wanted < 1 ? GammaQuantile(Total(moments.sum) / logs.positive, logs.sum / logs.positive, wanted) : 0;
    }
    case Distribution::kPareto: return ParetoQuantile(mean, Total(moments.squares) / count - mean * mean, density);
    case Distribution::kExponential: break;
  }
  return -mean * std::log(density);
}

// When no value reached the threshold: returns whether the values lack rare, large magnitudes.
bool HasNoTail(const float* values, int64_t n, double mean) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(values[i]));
  if (largest == 0) return false;
  if (largest <= 2 * mean) return true;
  return std::count_if(values, values + n, [largest](float value) { return std::fabs(value) == largest; }) > 1;
}

// Fits all stages. first: the moments of all values, with threshold 0.
Fit FitStages(const float* values, int64_t n, double density, const FitParams& params, const FitMoments& first,
              FitScratch* scratch) {
  const bool is_one = params.stages == 1 || density >= kFirstDensity;
  const double later = is_one ? 1 : std::pow(density / kFirstDensity, 1.0 / static_cast<double>(params.stages - 1));
  Distribution kind = params.distribution;
  double threshold = Quantile(first, values, n, is_one ? density : kFirstDensity, kind);
  if (kind != Distribution::kExponential) kind = Distribution::kPareto;
  const float* left = values;  // the values that reached the previous threshold, if they were moved
  int64_t count = n;
  // The second stage reads all values again: a quarter of them reach its threshold, too many to be worth moving.
  const bool moves = !is_one && params.stages > 2;
  float* reaching = moves ? scratch->reaching.Room(n) : nullptr;
  for (int64_t stage = 1; stage < (is_one ? 1 : params.stages); ++stage) {
    if (stage > 1) {
      count = Keep(left, count, SmallestReaching<float>(threshold), reaching);
      left = reaching;
    }
    FitMoments moments;
    AddMoments(left, count, threshold, &moments);
    if (Total(moments.count) < 2) break;
    threshold += Quantile(moments, left, count, later, kind);
  }
  Fit fit;
  fit.threshold = std::max(threshold, kSmallestFloat);
  const int64_t reached = NumberReaching(left, count, SmallestReaching<float>(fit.threshold));
  const double wanted = density * static_cast<double>(n);
  fit.is_misfit = reached > 0 ? static_cast<double>(reached) > static_cast<double>(kMost) * wanted && 2 * reached > n
                              : HasNoTail(values, n, Total(first.sum) / std::max(1.0, Total(first.count)));
  return fit;
}

}  // namespace

float* ReusedArray::Room(int64_t n) {
  if (size_ < n) {
    memory_.reset(new float[static_cast<size_t>(n)]);
    size_ = n;
  }
  return memory_.get();
}

int64_t FitRuns(int64_t n, int64_t k) {
  const int64_t size = std::max(kSmallestSample, kExpected * n / k);
  const int64_t wanted = size / kFitRun;
  return n <= size || wanted >= n / kFitRun ? 0 : wanted;
}

Fit FitTail(const float* values, int64_t n, double density, const FitParams& params, FitScratch* scratch) {
  FitMoments first;
  AddMoments(values, n, 0, &first);
  return FitStages(values, n, density, params, first, scratch);
}

FitSample::FitSample(int64_t n, int64_t k, const FitParams& params, FitScratch* scratch)
    : n_(n),
      k_(k),
      params_(params),
      runs_(FitRuns(n, k)),
      strata_(std::max<int64_t>(1, n / kFitRun), std::max<int64_t>(1, runs_), params.seed),
      scratch_(scratch),
      values_(runs_ == 0 ? nullptr : scratch->sample.Room(runs_ * kFitRun)) {
  next_ = strata_.Next() * kFitRun;
}

void FitSample::Read(const float* residual, int64_t end) {
  const int64_t first = read_;
  while (read_ < runs_ && next_ < end) {
    std::memcpy(values_ + kFitRun * read_++, residual + next_, kFitRun * sizeof(float));
    if (read_ < runs_) next_ = strata_.Next() * kFitRun;
  }
  AddMoments(values_ + kFitRun * first, kFitRun * (read_ - first), 0, &first_);
}

Fit FitSample::Run(const float* residual) {
  const double density = static_cast<double>(k_) / static_cast<double>(n_);
  if (runs_ == 0) return FitTail(residual, n_, density, params_, scratch_);
  Read(residual, n_);
  return FitStages(values_, runs_ * kFitRun, density, params_, first_, scratch_);
}

}  // namespace hvd_sparse
