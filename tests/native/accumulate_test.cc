#include "accumulate.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "arrays.h"
#include "cuts.h"
#include "expect.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

// Rounds once to float32. A double holds the product of two float32 exactly, and their sum accurately enough that a
// second rounding changes nothing.
float Rounded(double value) { return static_cast<float>(value); }
float Times(float a, float b) { return Rounded(static_cast<double>(a) * b); }
float Plus(float a, float b) { return Rounded(static_cast<double>(a) + b); }

struct Buffers {
  std::vector<float> residual, velocity;
};

struct Setting {
  const char* name;
  AccumulateRule rule;
  float factor, momentum, weight_decay;
};

const std::vector<Setting>& AllSettings() {
  static const std::vector<Setting> settings{
      {"residual", AccumulateRule::kResidual, 1, 0, 0},
      {"residual, clipped", AccumulateRule::kResidual, 0.3f, 0, 0},
      {"momentum", AccumulateRule::kMomentum, 1, 0.9f, 0},
      {"no momentum", AccumulateRule::kMomentum, 1, 0, 0},
      {"momentum, clipped, decay", AccumulateRule::kMomentum, 0.7f, 0.9f, 1e-2f},
      {"nesterov", AccumulateRule::kNesterov, 1, 0.9f, 0},
      {"nesterov, decay", AccumulateRule::kNesterov, 1, 0.5f, 1e-2f},
      {"overflows", AccumulateRule::kResidual, 3e38f, 0, 0},
      {"decay overflows", AccumulateRule::kMomentum, 0, 0.1f, 3e38f},
  };
  return settings;
}

float WithoutDenormal(float velocity) {
  return std::fabs(velocity) < std::numeric_limits<float>::min() ? 0.0f : velocity;
}

// The equations for a single element.
bool Expect(const Values& gradient, const Setting& s, const std::vector<float>& parameter, Buffers* buffers) {
  bool all_finite = true;
  for (size_t i = 0; i < parameter.size(); ++i) {
    const float value = Rounded(gradient.At(static_cast<int64_t>(i)));
    all_finite &= std::isfinite(value);
    float g = Times(std::isfinite(value) ? value : 0.0f, s.factor);
    if (s.weight_decay != 0) g = Plus(g, Times(parameter[i], s.weight_decay));
    all_finite &= std::isfinite(g);
    if (!std::isfinite(g)) g = 0;
    float u = buffers->velocity[i];
    float v = buffers->residual[i];
    switch (s.rule) {
      case AccumulateRule::kResidual: v = Plus(v, g); break;
      case AccumulateRule::kMomentum:
        u = WithoutDenormal(Plus(Times(s.momentum, u), g));
        v = Plus(v, u);
        break;
      case AccumulateRule::kNesterov:
        u = WithoutDenormal(Times(s.momentum, Plus(u, g)));
        v = Plus(Plus(v, u), g);
        break;
    }
    all_finite &= std::isfinite(u) && std::isfinite(v);
    if (!std::isfinite(u) || !std::isfinite(v)) continue;
    buffers->velocity[i] = u;
    buffers->residual[i] = v;
  }
  return all_finite;
}

std::vector<float> Floats(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = normal(random);
  return values;
}

AccumulateParams ParamsOf(const Setting& s, const std::vector<float>& parameter) {
  AccumulateParams params{s.rule, s.factor, s.momentum, s.weight_decay, nullptr};
  if (s.weight_decay != 0) params.parameter = parameter.data();
  return params;
}

Feedback FeedbackOf(const Setting& s, Buffers* buffers) {
  return {buffers->residual.data(), s.rule == AccumulateRule::kResidual ? nullptr : buffers->velocity.data()};
}

double HintFor(const std::vector<float>& residual, int64_t k, double times) {
  double threshold = 0;
  const Array array{residual.data(), static_cast<int64_t>(residual.size()), DType::kFloat32};
  EXPECT(SelectThreshold(array, {k, ThresholdMethod::kExact, 1, 0}, SerialFor, &threshold).ok(), "threshold");
  return threshold * times;
}

void CheckTopK(const Values& gradient, const Setting& s, const std::vector<float>& parameter, const Buffers& start,
               const Buffers& expected, bool expected_finite, const std::string& where) {
  const int64_t n = gradient.size();
  const Array residual{expected.residual.data(), n, DType::kFloat32};
  for (const int64_t k : {int64_t{1}, (n + 99) / 100, n}) {
    Selection wanted;
    EXPECT(SelectTopK(residual, {k, 0, 7}, SerialFor, &wanted).ok(), where);
    for (const double times : {0.0, 0.5, 0.98, 1.0, 1.01}) {
      const double hint = HintFor(expected.residual, k, times);
      for (const Cut& cut : AllCuts()) {
        Buffers buffers = start;
        Selection selection;
        bool finite = !expected_finite;
        const Status status = AccumulateTopK(gradient.array(), ParamsOf(s, parameter), {k, hint, 7}, cut.run,
                                             FeedbackOf(s, &buffers), &finite, &selection);
        EXPECT_STATUS(StatusKind::kOk, status, where);
        EXPECT_EQ(expected.residual, buffers.residual, where << ", " << cut.name);
        EXPECT_EQ(expected.velocity, buffers.velocity, where << ", " << cut.name);
        EXPECT_EQ(expected_finite, finite, where);
        EXPECT_EQ(wanted.indices, selection.indices, where << ", k = " << k << ", hint x " << times << cut.name);
        EXPECT_EQ(wanted.threshold, selection.threshold, where);
      }
    }
  }
}

// The indices of the expected residuals that reach a threshold, one element at a time.
std::vector<int64_t> Reaching(const std::vector<float>& residual, double threshold) {
  std::vector<int64_t> indices;
  for (size_t i = 0; i < residual.size(); ++i) {
    if (std::abs(static_cast<double>(residual[i])) >= threshold) indices.push_back(static_cast<int64_t>(i));
  }
  return indices;
}

void CheckFilter(const Values& gradient, const Setting& s, const std::vector<float>& parameter, const Buffers& start,
                 const Buffers& expected, bool expected_finite, const std::string& where) {
  const int64_t n = gradient.size();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double threshold : {0.0, HintFor(expected.residual, (n + 1) / 2, 1), HintFor(expected.residual, 1, 1),
                                 HintFor(expected.residual, (n + 99) / 100, 0.999), infinity}) {
    for (const Cut& cut : AllCuts()) {
      Buffers buffers = start;
      std::vector<int64_t> indices{-1};
      bool finite = !expected_finite;
      const Status status = AccumulateFilter(gradient.array(), ParamsOf(s, parameter), threshold, cut.run,
                                             FeedbackOf(s, &buffers), &finite, &indices);
      EXPECT_STATUS(StatusKind::kOk, status, where);
      EXPECT_EQ(expected.residual, buffers.residual, where << ", " << cut.name);
      EXPECT_EQ(expected.velocity, buffers.velocity, where << ", " << cut.name);
      EXPECT_EQ(expected_finite, finite, where);
      EXPECT_EQ(Reaching(expected.residual, threshold), indices, where << ", " << threshold << ", " << cut.name);
    }
  }
}

void CheckAll(const Values& gradient, const std::string& kind) {
  const int64_t n = gradient.size();
  const std::vector<float> parameter = Floats(n, 3);
  for (const Setting& s : AllSettings()) {
    if (!expect::Chosen(8)) continue;
    const std::string where =
        std::string(Name(gradient.dtype())) + ", " + kind + ", n = " + std::to_string(n) + ", " + s.name;
    const Buffers start{Floats(n, 1), Floats(n, 2)};
    Buffers expected = start;
    const bool expected_finite = Expect(gradient, s, parameter, &expected);
    for (const Cut& cut : AllCuts()) {
      Buffers buffers = start;
      EXPECT_EQ(expected_finite, Accumulate(gradient.array(), ParamsOf(s, parameter), cut.run, FeedbackOf(s, &buffers)),
                where);
      EXPECT_EQ(expected.residual, buffers.residual, where << ", " << cut.name);
      EXPECT_EQ(expected.velocity, buffers.velocity, where << ", " << cut.name);
    }
    CheckTopK(gradient, s, parameter, start, expected, expected_finite, where);
    CheckFilter(gradient, s, parameter, start, expected, expected_finite, where);
  }
}

TEST(EveryTypeSizeRuleHintAndCut) {
  for (const DType dtype : kDTypes) {
    for (const Pattern pattern : {Pattern::kSpread, Pattern::kMixed, Pattern::kDenormals, Pattern::kAnyBits}) {
      for (const int64_t n : {1, 63, 64, 65, 2049, 5000}) {
        CheckAll(Draw(dtype, pattern, n, static_cast<uint64_t>(n)), Name(pattern));
      }
    }
  }
}

TEST(EveryFloat16) {
  Values all(DType::kFloat16, 1 << 16);
  for (int64_t i = 0; i < all.size(); ++i) all.Set(i, static_cast<uint64_t>(i));
  const Setting& plain = AllSettings().front();
  const std::vector<float> zeros(static_cast<size_t>(all.size()));
  Buffers buffers{zeros, zeros}, expected = buffers;
  EXPECT(!Expect(all, plain, zeros, &expected), "there are infinities and NaN");
  EXPECT(!Accumulate(all.array(), ParamsOf(plain, zeros), SerialFor, FeedbackOf(plain, &buffers)), "finite");
  EXPECT_EQ(expected.residual, buffers.residual, "every float16");
}

// An update that overflows does not change its element. The top k never contain an infinity.
TEST(AnOverflowLeavesTheElement) {
  Values gradient(DType::kFloat32, 4);
  const float big = 3e38f;
  for (int64_t i = 0; i < 4; ++i) gradient.Set(i, FloatToBits(i < 2 ? big : 1.0f));
  for (const Setting& s : AllSettings()) {
    if (s.factor != 1 || s.weight_decay != 0) continue;
    const bool adds = s.rule == AccumulateRule::kResidual || s.momentum == 0;
    const bool nesterov = s.rule == AccumulateRule::kNesterov;
    // v = 2e38 + 3e38 overflows; so does u = 0.9 * 2e38 + 3e38; 1 + ... does not.
    Buffers buffers{{2e38f, 0, 2, -big}, {0, adds ? 0 : 2e38f, 4, 0}};
    Selection selection;
    bool finite = true;
    const Status status = AccumulateTopK(gradient.array(), ParamsOf(s, {}), {4, 0, 7}, SerialFor,
                                         FeedbackOf(s, &buffers), &finite, &selection);
    EXPECT_STATUS(StatusKind::kOk, status, s.name);
    EXPECT(!finite, s.name);
    EXPECT_EQ(2e38f, buffers.residual[0], s.name);
    EXPECT_EQ(0.0f, buffers.velocity[0], s.name);
    EXPECT_EQ(adds ? big : 0.0f, buffers.residual[1], s.name);
    const float u = nesterov ? Times(s.momentum, 5) : Plus(Times(s.momentum, 4), 1);
    EXPECT_EQ(s.rule == AccumulateRule::kResidual ? 3.0f : Plus(Plus(2, u), nesterov ? 1 : 0), buffers.residual[2],
              s.name);
    EXPECT_EQ(-big, buffers.residual[3], s.name);
  }
}

TEST(RefusesWithoutTouching) {
  const Values gradient = Draw(DType::kFloat32, Pattern::kSpread, 5, 0);
  const Setting& plain = AllSettings().front();
  for (const int64_t k : {0, 6, -1}) {
    Buffers buffers{std::vector<float>(5), std::vector<float>(5)};
    Selection selection;
    bool finite = true;
    const Status status = AccumulateTopK(gradient.array(), ParamsOf(plain, {}), {k, 0, 0}, SerialFor,
                                         FeedbackOf(plain, &buffers), &finite, &selection);
    EXPECT_STATUS(StatusKind::kInvalidArgument, status, k);
    EXPECT_EQ(std::vector<float>(5), buffers.residual, "nothing has happened");
  }
  for (const double threshold : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
    Buffers buffers{std::vector<float>(5), std::vector<float>(5)};
    std::vector<int64_t> indices;
    bool finite = true;
    const Status status = AccumulateFilter(gradient.array(), ParamsOf(plain, {}), threshold, SerialFor,
                                           FeedbackOf(plain, &buffers), &finite, &indices);
    EXPECT_STATUS(StatusKind::kInvalidArgument, status, threshold);
    EXPECT_EQ(std::vector<float>(5), buffers.residual, "nothing has happened");
  }
}

}  // namespace
}  // namespace hvd_sparse
