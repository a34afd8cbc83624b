// Compares the kernels that accumulate and select, run on the host, with the core.
#include <cmath>
#include <iterator>
#include <limits>

#include "../../csrc/cuda/accumulate.h"
#include "../../csrc/cuda/bucket.h"
#include "../../csrc/cuda/filter.h"
#include "../../csrc/cuda/finite.h"
#include "../../csrc/cuda/quantize.h"
#include "../../csrc/cuda/sample.h"
#include "../../csrc/cuda/select.h"
#include "../../csrc/cuda/threshold.h"
#include "device/arrays.h"
#include "finite.h"
#include "strata.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kSizes[] = {1, 5, 1000, 9001};

std::vector<int64_t> CountsFor(int64_t n) {
  std::vector<int64_t> ks{1};
  for (const int64_t k : {n / 100, n / 2, n}) {
    if (k > ks.back()) ks.push_back(k);
  }
  return ks;
}

// The result of a selection.
template <typename T>
struct Found {
  Found(int64_t k, int64_t n) : indices(static_cast<size_t>(k), -1), values(static_cast<size_t>(k)), info(2, -1.0) {
    int64_t size = 0;
    EXPECT_EQ(cudaSuccess, select_top_k_workspace_size(kDTypeOf<T>, n, k, &size), "size");
    workspace = std::make_unique<Scratch>(size);
  }
  SelectOutput output() { return {indices.data(), values.data(), info.data()}; }

  std::vector<int64_t> indices;
  std::vector<T> values;
  std::vector<double> info;
  std::unique_ptr<Scratch> workspace;
};

template <typename T>
void CheckSelection(const std::vector<T>& values, const SelectParams& params, const std::string& context) {
  const Array array{values.data(), static_cast<int64_t>(values.size()), kDTypeOf<T>};
  Selection expected;
  EXPECT_STATUS(StatusKind::kOk, SelectTopK(array, params, SerialFor, &expected), context);
  Found<T> found(params.k, array.size);
  EXPECT_EQ(cudaSuccess, select_top_k_launch(array, params, found.output(), found.workspace->data(), nullptr), context);
  EXPECT_EQ(expected.indices, found.indices, context);
  EXPECT_EQ(expected.threshold, found.info[0], context);
  int64_t reached = 0;
  for (const T& value : values) {
    const double magnitude = MagnitudeFromBits(T{}, MagnitudeBits(value));
    reached += magnitude >= params.threshold_hint && magnitude > 0;
  }
  const bool hinted = params.threshold_hint > 0 && params.threshold_hint < std::numeric_limits<double>::infinity();
  EXPECT_EQ(static_cast<double>(hinted ? reached : params.k), found.info[1], context);
  for (size_t j = 0; j < found.indices.size(); ++j) {
    const T& value = values[static_cast<size_t>(found.indices[j])];
    EXPECT(std::memcmp(&found.values[j], &value, sizeof value) == 0, context << ", value " << j);
  }
}

template <typename T>
void CheckSelections() {
  for (const Kind kind : kKinds) {
    for (const int64_t n : kSizes) {
      const std::vector<T> values = DrawValues<T>(kind, n, static_cast<uint64_t>(n));
      for (const int64_t k : CountsFor(n)) {
        const auto context =
            "kind " + std::to_string(static_cast<int>(kind)) + ", " + std::to_string(k) + " of " + std::to_string(n);
        CheckSelection(values, {k, 0, 7}, context + ", no hint");
        if (n != 9001 || k == n) continue;
        for (const double hint : {1e-300, 0.1, 1.0, 3.5, 1e30, std::numeric_limits<double>::infinity()}) {
          CheckSelection(values, {k, hint, 7}, context + ", hint " + std::to_string(hint));
        }
      }
    }
  }
}

TEST(SelectionOfFloat32) { CheckSelections<float>(); }
TEST(SelectionOfFloat64) { CheckSelections<double>(); }
TEST(SelectionOfFloat16) { CheckSelections<Float16>(); }
TEST(SelectionOfBFloat16) { CheckSelections<BFloat16>(); }

// The error feedback of one tensor, and a parameter.
struct State {
  explicit State(int64_t n)
      : residual(DrawValues<float>(Kind::kNormal, n, 1)),
        velocity(DrawValues<float>(Kind::kNormal, n, 2)),
        parameter(DrawValues<float>(Kind::kNormal, n, 3)) {}

  // All of a selection.
  Part PartOf(const Array& gradient, AccumulateRule rule, bool decays) {
    const AccumulateParams params{rule, 0.75f, 0.9f, decays ? 0.01f : 0.0f, decays ? parameter.data() : nullptr};
    return {gradient, params, {residual.data(), velocity.data()}, 0};
  }

  std::vector<float> residual, velocity, parameter;
};

// All keys have the same first digit. There is no room for all of them, so candidates are gathered after the second
// digit.
TEST(SelectsAmongKeysThatBeginAlike) {
  for (const int64_t k : {1, 90, 2000}) {
    for (const double hint : {0.0, 0.5, 1e9}) {
      std::vector<float> values = DrawValues<float>(Kind::kNormal, 9001, 12);
      for (float& value : values) value = std::copysign(1.0f + 0.01f * std::min(4.0f, std::abs(value)), value);
      CheckSelection(values, {k, hint, 7}, std::to_string(k) + " of nearly equal values, hint " + std::to_string(hint));
    }
  }
}

// With fewer than k nonzeros, zeros are selected by their indices, whose highest digits need no pass: three passes for
// the digits of the keys and one for bits 9 to 19 of the indices add one for each element.
TEST(SelectsZerosInFewPasses) {
  const int64_t n = 40'000, k = 400;
  std::vector<float> values(n);
  for (size_t i = 0; i < n; i += 1000) values[i] = -1.5f;
  const int64_t before = atomic_additions;
  CheckSelection(values, {k, 0, 7}, "few nonzeros");
  const int64_t additions = atomic_additions - before;
  EXPECT(additions < 5 * n, additions << " additions for " << n << " elements");
}

template <typename T>
void CheckAccumulation(int64_t n, int64_t shift, Kind kind, AccumulateRule rule, bool decays, double hint) {
  const auto context = std::to_string(n) + " elements of kind " + std::to_string(static_cast<int>(kind)) + ", rule " +
                       std::to_string(static_cast<int>(rule)) + ", hint " + std::to_string(hint);
  const std::vector<T> drawn = DrawValues<T>(kind, n + shift, 11);
  const Array gradient{drawn.data() + shift, n, kDTypeOf<T>};
  const int64_t k = std::max<int64_t>(1, n / 50);
  const SelectParams select{k, hint, 5};
  const PayloadFormat format{n, k};
  State expected(n), state(n);
  PayloadPlan plan{};
  EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &plan), context);
  std::vector<uint64_t> wanted(static_cast<size_t>(plan.size / 8)), found(wanted.size(), ~uint64_t{0});
  Selection selection;
  bool finite = false;
  EXPECT_STATUS(StatusKind::kOk,
                AccumulateAndPack({expected.PartOf(gradient, rule, decays)}, true, select, format, Level::kMean,
                                  SerialFor, reinterpret_cast<uint8_t*>(wanted.data()), &finite, &selection),
                context);
  const BucketSelections bucket{
      {plan, {state.PartOf(gradient, rule, decays)}, select, nullptr, reinterpret_cast<uint8_t*>(found.data())}};
  int64_t size = 0;
  EXPECT_EQ(cudaSuccess, accumulate_bucket_workspace_size(bucket, &size), context);
  Scratch workspace(size);
  double info[2] = {-1, -1};
  bool found_finite = !finite;
  EXPECT_EQ(cudaSuccess,
            accumulate_bucket_launch(bucket, true, Level::kMean, info, &found_finite, workspace.data(), nullptr),
            context);
  EXPECT(SameFloats(expected.residual, state.residual), context);
  EXPECT(SameFloats(expected.velocity, state.velocity), context);
  EXPECT(wanted == found, context);
  EXPECT_EQ(selection.threshold, info[0], context);
  EXPECT_EQ(finite, found_finite, context);
  State alone(n);
  const Part part = alone.PartOf(gradient, rule, decays);
  found_finite = true;  // as launchers are handed it
  EXPECT_EQ(cudaSuccess,
            accumulate_launch(MakeAccumulateJob(gradient, part.params, part.feedback, &found_finite), nullptr),
            context);
  EXPECT(SameFloats(expected.residual, alone.residual), context);
  EXPECT(SameFloats(expected.velocity, alone.velocity), context);
  EXPECT_EQ(finite, found_finite, context);
}

template <typename T>
void CheckAccumulations() {
  for (const int64_t n : kSizes) {
    for (const AccumulateRule rule :
         {AccumulateRule::kResidual, AccumulateRule::kMomentum, AccumulateRule::kNesterov}) {
      for (const double hint : {0.0, 2.0, 1e-3, 1e9}) {
        CheckAccumulation<T>(n, 0, Kind::kNormal, rule, hint > 1, hint);
      }
      CheckAccumulation<T>(n, 1, Kind::kNormal, rule, true, 2.0);
      CheckAccumulation<T>(n, 0, Kind::kInfinite, rule, true, 2.0);
      CheckAccumulation<T>(n, 0, Kind::kNan, rule, false, 2.0);
    }
  }
}

TEST(AccumulationOfFloat32) { CheckAccumulations<float>(); }
TEST(AccumulationOfFloat64) { CheckAccumulations<double>(); }
TEST(AccumulationOfFloat16) { CheckAccumulations<Float16>(); }
TEST(AccumulationOfBFloat16) { CheckAccumulations<BFloat16>(); }

TEST(SeveralTensorsAreAccumulatedInOneCall) {
  std::vector<Part> parts;
  std::vector<std::unique_ptr<State>> states, alone;
  std::vector<std::vector<float>> drawn;
  for (const int64_t n : kSizes) {
    drawn.push_back(DrawValues<float>(n == 1000 ? Kind::kNan : Kind::kNormal, n, 13));
    states.push_back(std::make_unique<State>(n));
    alone.push_back(std::make_unique<State>(n));
    parts.push_back(states.back()->PartOf({drawn.back().data(), n, DType::kFloat32}, AccumulateRule::kMomentum, false));
  }
  Scratch workspace(accumulate_workspace_size(parts));
  bool finite[std::size(kSizes)] = {};
  EXPECT_EQ(cudaSuccess, accumulate_launch(parts, finite, workspace.data(), nullptr), "launch");
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part part = alone[i]->PartOf(parts[i].gradient, AccumulateRule::kMomentum, false);
    EXPECT_EQ(Accumulate(part.gradient, part.params, SerialFor, part.feedback), finite[i], i);
    EXPECT(SameFloats(alone[i]->residual, states[i]->residual), i);
    EXPECT(SameFloats(alone[i]->velocity, states[i]->velocity), i);
  }
}

TEST(SamplesAreTheCoresOwn) {
  const std::vector<float> values = DrawValues<float>(Kind::kNormal, 10'007, 14);
  for (const int64_t count : {1, 7, 625}) {
    std::vector<float> sample(static_cast<size_t>(16 * count), 9.0f);
    EXPECT_EQ(cudaSuccess, sample_runs_launch(values.data(), 10'007, count, 16, 5, sample.data(), nullptr), count);
    Strata strata(10'007 / 16, count, 5);
    for (int64_t run = 0; run < count; ++run) {
      const auto begin = values.begin() + 16 * strata.Next();
      EXPECT(std::equal(begin, begin + 16, sample.begin() + 16 * run), "run " << run << " of " << count);
    }
  }
}

template <typename T>
void CheckThresholds() {
  for (const Kind kind : kKinds) {
    const int64_t n = 30'001;
    const std::vector<T> values = DrawValues<T>(kind, n, 3);
    const Array array{values.data(), n, kDTypeOf<T>};
    for (const auto method : {ThresholdMethod::kExact, ThresholdMethod::kSampled}) {
      for (const int64_t k : {int64_t{1}, int64_t{3000}, n - 5}) {
        const ThresholdParams params{k, method, 0.01, 4};
        double expected = -1, found = -2;
        EXPECT_STATUS(StatusKind::kOk, SelectThreshold(array, params, SerialFor, &expected), "k = " << k);
        ThresholdPlan plan;
        EXPECT_STATUS(StatusKind::kOk, PlanThreshold(n, params, &plan), "k = " << k);
        Scratch workspace(select_threshold_workspace_size(array.dtype, plan));
        EXPECT_EQ(cudaSuccess, select_threshold_launch(array, plan, 4, &found, workspace.data(), nullptr), "k = " << k);
        EXPECT_EQ(expected, found,
                  "k = " << k << ", kind " << static_cast<int>(kind) << ", sampled " << plan.is_sampled);
      }
    }
  }
}

TEST(ThresholdsOfFloat32) { CheckThresholds<float>(); }
TEST(ThresholdsOfFloat64) { CheckThresholds<double>(); }
TEST(ThresholdsOfFloat16) { CheckThresholds<Float16>(); }

template <typename T>
void CheckFilter(Kind kind, int64_t n, double threshold) {
  const std::vector<T> values = DrawValues<T>(kind, n, 6);
  const Array array{values.data(), n, kDTypeOf<T>};
  std::vector<int64_t> expected;
  EXPECT_STATUS(StatusKind::kOk, FilterThreshold(array, threshold, SerialFor, &expected), threshold);
  unsigned long long count = 77;
  EXPECT_EQ(cudaSuccess, count_reaching_launch(array, threshold, &count, nullptr), threshold);
  EXPECT_EQ(expected.size(), static_cast<size_t>(count), "threshold " << threshold);
  if (expected.size() != count || count == 0) return;
  int64_t size = 0;
  EXPECT_EQ(cudaSuccess, filter_threshold_workspace_size(n, static_cast<int64_t>(count), &size), threshold);
  Scratch workspace(size);
  std::vector<int64_t> indices(expected.size());
  std::vector<T> selected(expected.size());
  EXPECT_EQ(cudaSuccess,
            filter_threshold_launch(array, threshold, static_cast<int64_t>(count), indices.data(), selected.data(),
                                    workspace.data(), nullptr),
            threshold);
  EXPECT_EQ(expected, indices, "threshold " << threshold);
}

TEST(Filters) {
  for (const Kind kind : kKinds) {
    for (const double threshold : {0.0, 5e-324, 0.5, 2.0, 1e300, std::numeric_limits<double>::infinity()}) {
      CheckFilter<float>(kind, 5001, threshold);
      CheckFilter<BFloat16>(kind, 33, threshold);
      CheckFilter<double>(kind, 0, threshold);
    }
  }
}

TEST(FiniteOrNot) {
  for (const Kind kind : kKinds) {
    const std::vector<double> values = DrawValues<double>(kind, 3001, 8);
    const Array array{values.data(), 3001, DType::kFloat64};
    bool finite = false;
    EXPECT_EQ(cudaSuccess, all_finite_launch(array, &finite, nullptr), "of kind " << static_cast<int>(kind));
    EXPECT_EQ(AllFinite(array, SerialFor), finite, "of kind " << static_cast<int>(kind));
  }
}

TEST(Quantized) {
  const std::vector<float> values = DrawValues<float>(Kind::kInfinite, 3001, 9);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kNone}) {
    std::vector<float> expected(values.size()), found(values.size());
    Quantize(values.data(), 3001, dtype, expected.data());
    EXPECT_EQ(cudaSuccess, quantize_launch(values.data(), 3001, dtype, found.data(), nullptr), "launch");
    EXPECT(SameFloats(expected, found), "as type " << static_cast<int>(dtype));
  }
}

}  // namespace
}  // namespace hvd_sparse
