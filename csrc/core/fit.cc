#include "fit.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>

#include "candidates.h"
#include "multiversion.h"
#include "strata.h"
#include "threshold.h"
#include "update.h"

namespace hvd_sparse {
namespace {

constexpr double kFirstDensity = 0.25;  // what the first of several stages keeps; the others share the rest evenly
constexpr double kSmallestFloat = 0x1p-149;
constexpr int64_t kMost = 4;  // times as many as wanted may reach a threshold, whatever the fit is like
constexpr int64_t kSmallestSample = int64_t{1} << 16;
constexpr int64_t kExpected = 256;  // of the k largest, in a sample
constexpr int64_t kLanes = 16;      // sums that do not wait for each other, so that they are made several at a time
constexpr int64_t kTogether = 64;   // runs that are looked up, fetched and read together

// Of |value| - threshold, over the values whose magnitude reaches the threshold. NaN reaches none.
struct Moments {
  double count[kLanes] = {};
  double sum[kLanes] = {};
  double squares[kLanes] = {};

  static double Total(const double* lanes) {
    double total = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) total += lanes[lane];
    return total;
  }
};

// n is a multiple of kLanes.
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

void AddMoments(const float* values, int64_t n, double threshold, Moments* moments) {
  const int64_t whole = n / kLanes * kLanes;
  AddLanes(values, whole, threshold, moments->count, moments->sum, moments->squares);
  if (whole == n) return;
  float rest[kLanes];
  std::fill(std::begin(rest), std::end(rest), std::nanf(""));
  std::copy(values + whole, values + n, rest);
  AddLanes(rest, kLanes, threshold, moments->count, moments->sum, moments->squares);
}

// The sum of the logarithms of the magnitudes above 0, and how many these are: of products of 4, whose exponents are
// taken out before they overflow. n is a multiple of kLanes.
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

double MeanLog(const float* values, int64_t n) {
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
  return logs / Moments::Total(positive);
}

// Moves the magnitudes that reach the bar to the front of `kept`, which may be the values themselves; returns how many.
int64_t Keep(const float* values, int64_t n, uint32_t bar, float* kept) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = MagnitudeBits(values[i]);
    kept[count] = BitsToFloat(bits);
    count += Reaches<float>(bits, bar);
  }
  return count;
}

HVD_SPARSE_MULTIVERSION int64_t CountReaching(const float* values, int64_t n, uint32_t bar) {
  int64_t total = 0;
  for (int64_t i = 0; i < n;) {
    const int64_t end = i + kSmallestSample < n ? i + kSmallestSample : n;
    int32_t count = 0;
    for (; i < end; ++i) count += Reaches<float>(MagnitudeBits(values[i]), bar) ? 1 : 0;
    total += count;
  }
  return total;
}

// Minka's closed form, and the first term of the tail (Corollary 1.2).
double GammaQuantile(double mean, double mean_log, double density) {
  const double s = std::log(mean) - mean_log;
  if (!(s > 0)) return mean;  // a constant
  const double shape = (3 - s + std::sqrt((s - 3) * (s - 3) + 24 * s)) / (12 * s);
  int sign = 0;
  return std::max(0.0, -mean / shape * (std::log(density) + lgamma_r(shape, &sign)));
}

// By two moments (Corollary 1.3).
double ParetoQuantile(double mean, double variance, double density) {
  if (!(variance > 0)) return mean;  // a constant
  const double ratio = mean * mean / variance;
  const double shape = 0.5 * (1 - ratio);
  const double scale = 0.5 * mean * (ratio + 1);
  if (std::abs(shape) < 1e-9) return -scale * std::log(density);  // exponential
  return scale / shape * (std::pow(density, -shape) - 1);
}

// Of the excess that has these moments: what a part `density` of the distribution exceeds.
double Quantile(const Moments& moments, const float* values, int64_t n, double density, Distribution kind) {
  const double count = Moments::Total(moments.count);
  const double mean = count > 0 ? Moments::Total(moments.sum) / count : 0;
  if (!(mean > 0 && mean < HUGE_VAL)) return 0;
  switch (kind) {
    case Distribution::kGamma: return GammaQuantile(mean, MeanLog(values, n), density);
    case Distribution::kPareto:
      return ParetoQuantile(mean, Moments::Total(moments.squares) / count - mean * mean, density);
    case Distribution::kExponential: break;
  }
  return -mean * std::log(density);
}

// None of the values reached the threshold: were there no rare, large ones?
bool HasNoTail(const float* values, int64_t n, double mean) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(values[i]));
  if (largest == 0) return false;
  if (largest <= 2 * mean) return true;
  return std::count_if(values, values + n, [largest](float value) { return std::fabs(value) == largest; }) > 1;
}

// `first`: of all values and no threshold.
Fit FitStages(const float* values, int64_t n, double density, const FitParams& params, const Moments& first) {
  const bool is_one = params.stages == 1 || density >= kFirstDensity;
  const double later = is_one ? 1 : std::pow(density / kFirstDensity, 1.0 / static_cast<double>(params.stages - 1));
  Distribution kind = params.distribution;
  double threshold = Quantile(first, values, n, is_one ? density : kFirstDensity, kind);
  if (kind != Distribution::kExponential) kind = Distribution::kPareto;
  const float* left = values;  // what reached the last threshold that it was looked for
  int64_t count = n;
  const std::unique_ptr<float[]> kept(is_one ? nullptr : new float[static_cast<size_t>(n)]);  // not set to zero
  for (int64_t stage = 1; stage < (is_one ? 1 : params.stages); ++stage) {
    count = Keep(left, count, SmallestReaching<float>(threshold), kept.get());
    left = kept.get();
    if (count < 2) break;
    Moments moments;
    AddMoments(left, count, threshold, &moments);
    threshold += Quantile(moments, left, count, later, kind);
  }
  Fit fit;
  fit.threshold = std::max(threshold, kSmallestFloat);
  const int64_t reached = CountReaching(left, count, SmallestReaching<float>(fit.threshold));
  const double wanted = density * static_cast<double>(n);
  fit.ratio = static_cast<double>(reached) / wanted;
  fit.is_misfit = reached > 0
                      ? static_cast<double>(reached) > static_cast<double>(kMost) * wanted && 2 * reached > n
                      : HasNoTail(values, n, Moments::Total(first.sum) / std::max(1.0, Moments::Total(first.count)));
  return fit;
}

// What the residual will be at runs that begin at these elements.
template <typename T>
inline __attribute__((always_inline)) void ReadRuns(const T* gradient, const float* residual, float factor,
                                                    const int64_t* begins, int64_t count, float* values) {
  for (int64_t j = 0; j < count; ++j) {
    const T* from = gradient + begins[j];
    const float* old = residual + begins[j];
    float* to = values + j * kFitRun;
    for (int64_t i = 0; i < kFitRun; ++i) {
      bool unused = true;
      to[i] = old[i];
      Update<AccumulateRule::kResidual>(Incoming(from[i], factor, 0, 0, false, &unused), 0, nullptr, to + i);
    }
  }
}

#define HVD_SPARSE_PREVIEW(T)                                                                                         \
  HVD_SPARSE_MULTIVERSION void Preview(const T* gradient, const float* residual, float factor, const int64_t* begins, \
                                       int64_t count, float* values) {                                                \
    ReadRuns(gradient, residual, factor, begins, count, values);                                                      \
  }
HVD_SPARSE_PREVIEW(float)
HVD_SPARSE_PREVIEW(double)
HVD_SPARSE_PREVIEW(Float16)
HVD_SPARSE_PREVIEW(BFloat16)
#undef HVD_SPARSE_PREVIEW

// Reads the sample, and adds its moments while a cache holds it.
template <typename T>
void ReadSample(const T* gradient, const float* residual, float factor, Strata strata, int64_t runs, float* values,
                Moments* moments) {
  int64_t begins[2][kTogether];
  const auto look_up = [&](int64_t first, int64_t* found) {
    const int64_t count = std::clamp<int64_t>(runs - first, 0, kTogether);
    for (int64_t j = 0; j < count; ++j) {
      found[j] = strata.Next() * kFitRun;
      __builtin_prefetch(residual + found[j]);
      __builtin_prefetch(gradient + found[j]);
    }
    return count;
  };
  int64_t count = look_up(0, begins[0]);
  for (int64_t first = 0, turn = 0; count > 0; first += kTogether, turn ^= 1) {
    const int64_t next = look_up(first + kTogether, begins[turn ^ 1]);
    float* out = values + first * kFitRun;
    Preview(gradient, residual, factor, begins[turn], count, out);
    AddLanes(out, count * kFitRun, 0, moments->count, moments->sum, moments->squares);
    count = next;
  }
}

}  // namespace

int64_t FitRuns(int64_t n, int64_t k) {
  const int64_t size = std::max(kSmallestSample, kExpected * n / k);
  const int64_t wanted = size / kFitRun;
  return n <= size || wanted >= n / kFitRun ? 0 : wanted;
}

Fit FitTail(const float* values, int64_t n, double density, const FitParams& params) {
  Moments first;
  AddMoments(values, n, 0, &first);
  return FitStages(values, n, density, params, first);
}

Fit FitPart(const Part& part, int64_t k, const FitParams& params, bool active, const ParallelFor& parallel_for,
            bool* is_done, bool* finite) {
  const int64_t n = part.gradient.size;
  const double density = static_cast<double>(k) / static_cast<double>(n);
  const int64_t runs = active ? FitRuns(n, k) : 0;
  if (active && runs == 0) *finite = Accumulate(part.gradient, part.params, parallel_for, part.memory);
  *is_done = runs == 0;
  if (runs == 0) return FitTail(part.memory.residual, n, density, params);
  const std::unique_ptr<float[]> sample(new float[static_cast<size_t>(runs * kFitRun)]);  // not set to zero
  Moments first;
  Dispatch(part.gradient, [&](const auto* data) {
    ReadSample(data, part.memory.residual, part.params.factor, Strata(n / kFitRun, runs, params.seed), runs,
               sample.get(), &first);
  });
  return FitStages(sample.get(), runs * kFitRun, density, params, first);
}

}  // namespace hvd_sparse
