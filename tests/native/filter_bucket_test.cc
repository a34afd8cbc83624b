#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "bucket.h"
#include "cuts.h"
#include "expect.h"
#include "finite.h"
#include "joined.h"
#include "payloads.h"
#include "select.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

// The expected result of FilterAndPack, computed in separate steps.
struct Filtering {
  Bytes payload;
  Filtered found;
  bool finite = false;
};

Filtering FilterByHand(Joined* joined, bool active, const FilterParams& filter, PayloadFormat format, Level level) {
  Filtering result;
  const Array gradient = joined->gradient.array();
  result.finite =
      active ? Accumulate(gradient, joined->params, SerialFor, joined->feedback()) : AllFinite(gradient, SerialFor);
  double& threshold = result.found.threshold = filter.threshold;
  if (filter.kind == FilterKind::kWithTies) {
    EXPECT(SelectThreshold(joined->residuals(), {filter.k}, SerialFor, &threshold).ok(), "the threshold of k");
    if (threshold == 0) threshold = std::ldexp(1.0, -149);
  }
  std::vector<int64_t> indices;
  const bool exactly = filter.kind == FilterKind::kExactly;
  Selection largest;  // if exactly k: these and no more, but for zeros
  if (exactly) {
    EXPECT(SelectTopK(joined->residuals(), {filter.k, 0, 0}, SerialFor, &largest).ok(), "the largest");
    threshold = std::max(largest.threshold, std::ldexp(1.0, -149));
  }
  for (size_t i = 0; i < joined->residual.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (exactly && !std::binary_search(largest.indices.begin(), largest.indices.end(), index)) continue;
    if (std::abs(static_cast<double>(joined->residual[i])) >= threshold) indices.push_back(index);
  }
  const auto count = result.found.count = static_cast<int64_t>(indices.size());
  Floats values;
  for (const int64_t index : indices) values.push_back(joined->residual[static_cast<size_t>(index)]);
  if (IsLowBit(format.dtype)) {
    EXPECT(
        QuantizeLowBit(values.data(), indices.data(), count, format.dtype, level, format.segments, values.data()).ok(),
        "quantized");
  }
  const std::vector<double> wide(values.begin(), values.end());
  const void* sent = format.dtype == DType::kFloat64 ? static_cast<const void*>(wide.data()) : values.data();
  int64_t size = 0;
  format.k = std::max<int64_t>(1, count);
  EXPECT(PayloadSize(format, &size).ok(), "size");
  result.payload.resize(static_cast<size_t>(size));
  EXPECT(Pack(format, indices.data(), sent, count, result.payload.data()).ok(), "packed");
  return result;
}

void CheckFiltered(DType dtype, Pattern pattern, const Rule& rule, const FilterParams& filter, bool active,
                   const PayloadFormat& format) {
  const Shape shape{"whole", format.n, {{0, format.n}}};
  const std::string where = std::string(Name(dtype)) + " " + Name(pattern) + ", " + rule.name + ", sent as " +
                            Name(format.dtype) + ", threshold " + std::to_string(filter.threshold) + ", kind " +
                            std::to_string(static_cast<int>(filter.kind)) + ", k " + std::to_string(filter.k) +
                            (active ? "" : ", not active");
  for (const Cut& cut : AllCuts()) {
    Joined expected(shape, dtype, pattern, rule), received(shape, dtype, pattern, rule);
    const Filtering wanted = FilterByHand(&expected, active, filter, format, Level::kMin);
    Bytes message{1, 2, 3};  // it is appended to
    Filtered found;
    bool finite = !wanted.finite;
    const Part part{received.gradient.array(), received.params, received.feedback(), 0};
    EXPECT_STATUS(StatusKind::kOk,
                  FilterAndPack(part, active, filter, format, Level::kMin, cut.run, &message, &finite, &found), where);
    EXPECT_EQ(wanted.found.threshold, found.threshold, where << ", " << cut.name);
    EXPECT_EQ(wanted.found.count, found.count, where << ", " << cut.name);
    EXPECT_EQ(wanted.finite, finite, where);
    EXPECT(wanted.payload == Bytes(message.begin() + 3, message.end()), where << ", " << cut.name);
    EXPECT_EQ(expected.residual, received.residual, where);
    EXPECT_EQ(expected.velocity, received.velocity, where);
  }
}

TEST(FiltersAndPacks) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<FilterParams> filters{{FilterKind::kThreshold, 0},         {FilterKind::kThreshold, 1.7},
                                          {FilterKind::kThreshold, kInfinity}, {FilterKind::kWithTies, kInfinity, 30},
                                          {FilterKind::kWithTies, 0, 1000},    {FilterKind::kWithTies, -1, 999},
                                          {FilterKind::kExactly, 0, 30},       {FilterKind::kExactly, 0, 1000}};
  for (const Rule& rule : kRules) {
    for (const FilterParams& filter : filters) {
      for (const bool active : {true, false}) {
        for (const Pattern pattern : {Pattern::kSpread, Pattern::kSparse, Pattern::kMixed}) {
          for (const DType dtype : kDTypes) {
            if (!expect::Chosen(4)) continue;
            CheckFiltered(dtype, pattern, rule, filter, active, {1000, 0, Coding::kRunLength, DType::kFloat32});
          }
        }
        for (const DType sent : kWithLowBit) {
          const Segments segments = IsLowBit(sent) ? Segments{{0, 7}} : Segments{};
          for (const Coding coding : kCodings) {
            if (!expect::Chosen(4)) continue;
            CheckFiltered(DType::kFloat32, Pattern::kTies, rule, filter, active, {1000, 5, coding, sent, segments});
          }
        }
      }
    }
  }
}

TEST(AFilterRefusesWithoutTouching) {
  const Shape shape{"whole", 1000, {{0, 1000}}};
  Joined joined(shape, DType::kFloat32, Pattern::kSpread, kRules[1]);
  const Floats residual = joined.residual;
  const Part part{joined.gradient.array(), joined.params, joined.feedback(), 0};
  const PayloadFormat plain{}, apart{0, 0, Coding::kAuto, DType::kInt2, {{1, 1}}};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const bool active : {true, false}) {
    for (const FilterParams& filter : {FilterParams{FilterKind::kThreshold, -1},
                                       {FilterKind::kThreshold, nan},
                                       {FilterKind::kWithTies, 1, 0},
                                       {FilterKind::kWithTies, 1, 1001},
                                       {FilterKind::kExactly, 1, -1},
                                       {FilterKind::kExactly, 1, 1001}}) {
      Bytes message;
      bool finite = true;
      Filtered found;
      EXPECT_STATUS(StatusKind::kInvalidArgument,
                    FilterAndPack(part, active, filter, plain, Level::kMean, SerialFor, &message, &finite, &found),
                    filter.threshold << ", " << filter.k);
      EXPECT_STATUS(StatusKind::kInvalidArgument,
                    FilterAndPack(part, active, {FilterKind::kThreshold, 1}, apart, Level::kMean, SerialFor, &message,
                                  &finite, &found),
                    "segments that do not start at 0");
      EXPECT(message.empty(), "nothing is written");
    }
  }
  EXPECT_EQ(residual, joined.residual, "nothing has happened");
}

TEST(CountAndStagesSayWhatKindOfFilter) {
  const auto make = [](int64_t k, int64_t stages) {
    const FilterParams filter = MakeFilter(2.5, k, {stages, Distribution::kGamma, 3});
    EXPECT(filter.threshold == 2.5 && filter.k == k, k);
    return filter;
  };
  EXPECT_EQ(FilterKind::kThreshold, make(0, 0).kind, "0");
  EXPECT_EQ(FilterKind::kWithTies, make(3, 0).kind, "3");
  EXPECT_EQ(FilterKind::kWithTies, make(-3, 0).kind, "which CheckFilter refuses");
  const FilterParams fitted = make(3, 2);
  EXPECT_EQ(FilterKind::kFitted, fitted.kind, "with stages");
  EXPECT(fitted.fit.stages == 2 && fitted.fit.distribution == Distribution::kGamma && fitted.fit.seed == 3, "the fit");
}

}  // namespace
}  // namespace hvd_sparse
