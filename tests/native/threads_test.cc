// Every function with a ParallelFor gives the same result on parallel threads as on one. The other tests check this
// with every kind of value; this one is short enough for ThreadSanitizer.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "accumulate.h"
#include "bucket.h"
#include "changes.h"
#include "cuts.h"
#include "expect.h"
#include "finite.h"
#include "partition.h"
#include "payloads.h"
#include "reduce.h"
#include "row_select.h"
#include "select.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kSize = 70001, kCount = 700;

Selection Selected(const Values& values, const SelectParams& params, const ParallelFor& parallel_for) {
  Selection selection;
  EXPECT_STATUS(StatusKind::kOk, SelectTopK(values.array(), params, parallel_for, &selection), Name(values.dtype()));
  return selection;
}

void ExpectSame(const Selection& expected, const Selection& received, const std::string& where) {
  EXPECT_EQ(expected.indices, received.indices, where);
  EXPECT_EQ(expected.threshold, received.threshold, where);
}

TEST(Selects) {
  for (const DType dtype : kDTypes) {
    for (const Pattern pattern : {Pattern::kSpread, Pattern::kTies, Pattern::kSparse}) {
      const Values values = Draw(dtype, pattern, kSize, 1);
      const Selection expected = Selected(values, {kCount, 0, 3}, SerialFor);
      for (const double times : {0.0, 0.5, 0.98, 1.01}) {  // sampled, far too many, a good one, too few
        const SelectParams params{kCount, times * expected.threshold, 3};
        ExpectSame(expected, Selected(values, params, ThreadedFor),
                   Name(pattern) + std::string(", hint times ") + std::to_string(times));
      }
      std::vector<int64_t> serial, threaded;
      EXPECT(FilterThreshold(values.array(), expected.threshold, SerialFor, &serial).ok(), Name(dtype));
      EXPECT(FilterThreshold(values.array(), expected.threshold, ThreadedFor, &threaded).ok(), Name(dtype));
      EXPECT_EQ(serial, threaded, Name(dtype) << ", " << Name(pattern));
    }
  }
}

TEST(SelectsAmongDifferences) {
  const Values minuend = Draw(DType::kFloat32, Pattern::kSpread, kSize, 8);
  const Values subtrahend = Draw(DType::kFloat32, Pattern::kSpread, kSize, 9);
  const auto run = [&](double hint, const ParallelFor& parallel_for) {
    Selection selection;
    EXPECT_STATUS(StatusKind::kOk,
                  SelectTopKOfDifference(static_cast<const float*>(minuend.array().data),
                                         static_cast<const float*>(subtrahend.array().data), kSize, {kCount, hint, 3},
                                         parallel_for, &selection),
                  hint);
    return selection;
  };
  const Selection expected = run(0, SerialFor);
  for (const double times : {0.0, 0.5, 0.98, 1.01}) {
    ExpectSame(expected, run(times * expected.threshold, ThreadedFor), "hint times " + std::to_string(times));
  }
}

TEST(FindsThresholds) {
  for (const DType dtype : kDTypes) {
    const Values values = Draw(dtype, Pattern::kSpread, kSize, 2);
    for (const ThresholdMethod method : {ThresholdMethod::kExact, ThresholdMethod::kSampled}) {
      const ThresholdParams params{kCount, method, 0.005, 5};
      double serial = -1, threaded = -2;
      EXPECT(SelectThreshold(values.array(), params, SerialFor, &serial).ok(), Name(dtype));
      EXPECT(SelectThreshold(values.array(), params, ThreadedFor, &threaded).ok(), Name(dtype));
      EXPECT_EQ(serial, threaded, Name(dtype));
    }
  }
}

TEST(SelectsInRows) {
  constexpr int64_t kColumns = 701, kRows = kSize / kColumns, kInRows = kRows * kColumns;
  for (const DType dtype : kDTypes) {
    const Values values = Draw(dtype, Pattern::kTies, kInRows, 7);
    const Matrix matrix{values.array().data, kRows, kColumns, dtype};
    std::vector<std::vector<uint8_t>> masks;
    std::vector<std::vector<double>> thresholds;
    for (const ParallelFor& run : {ParallelFor(SerialFor), ParallelFor(ThreadedFor)}) {
      masks.insert(masks.end(), 2, std::vector<uint8_t>(kInRows));
      thresholds.insert(thresholds.end(), 2, std::vector<double>(kRows));
      const size_t at = masks.size() - 2;
      EXPECT(SelectTopKRows(matrix, 35, 1, run, masks[at].data(), thresholds[at].data()).ok(), Name(dtype));
      EXPECT(LaplaceThresholdRows(matrix, 0.05, run, thresholds[at + 1].data()).ok(), Name(dtype));
      EXPECT(FilterThresholdRows(matrix, thresholds[at].data(), kRows, run, masks[at + 1].data()).ok(), Name(dtype));
    }
    for (const size_t at : {0u, 1u}) {
      EXPECT(masks[at] == masks[at + 2], Name(dtype));
      EXPECT_EQ(thresholds[at], thresholds[at + 2], Name(dtype));
    }
  }
}

TEST(LooksForWhatIsNotFinite) {
  for (const DType dtype : kDTypes) {
    Values values = Draw(dtype, Pattern::kSpread, kSize, 3);
    EXPECT(AllFinite(values.array(), ThreadedFor), Name(dtype));
    for (const int64_t place : {int64_t{0}, kSize / 2, kSize - 1}) values.Set(place, FieldsOf(dtype).infinity());
    EXPECT(!AllFinite(values.array(), ThreadedFor), Name(dtype));
  }
}

struct Memories {
  std::vector<float> residual = std::vector<float>(kSize, 0.25f), velocity = std::vector<float>(kSize, -0.5f);
  Feedback get() { return {residual.data(), velocity.data()}; }
};

TEST(Accumulates) {
  for (const DType dtype : kDTypes) {
    for (const bool spoilt : {false, true}) {
      Values gradient = Draw(dtype, Pattern::kSpread, kSize, 4);
      for (int64_t i = 0; spoilt && i < kSize; i += 1000) gradient.Set(i, FieldsOf(dtype).infinity() | 1);
      const AccumulateParams params{AccumulateRule::kNesterov, 0.5f, 0.9f, 0, nullptr};
      Memories serial, threaded;
      EXPECT_EQ(!spoilt, Accumulate(gradient.array(), params, SerialFor, serial.get()), Name(dtype));
      EXPECT_EQ(!spoilt, Accumulate(gradient.array(), params, ThreadedFor, threaded.get()), Name(dtype));
      EXPECT_EQ(serial.residual, threaded.residual, Name(dtype));
      EXPECT_EQ(serial.velocity, threaded.velocity, Name(dtype));
    }
  }
}

TEST(AccumulatesAndSelects) {
  for (const DType dtype : kDTypes) {
    const Values gradient = Draw(dtype, Pattern::kSpread, kSize, 5);
    const AccumulateParams params{AccumulateRule::kMomentum, 1, 0.9f, 0, nullptr};
    Memories serial;
    Selection expected;
    bool finite = false;
    EXPECT(AccumulateTopK(gradient.array(), params, {kCount, 0, 7}, SerialFor, serial.get(), &finite, &expected).ok(),
           Name(dtype));
    for (const double times : {0.0, 0.9, 1.01}) {
      const SelectParams select{kCount, times * expected.threshold, 7};
      Memories threaded;
      Selection selection;
      finite = false;
      EXPECT(AccumulateTopK(gradient.array(), params, select, ThreadedFor, threaded.get(), &finite, &selection).ok(),
             Name(dtype));
      EXPECT(finite, Name(dtype));
      EXPECT_EQ(serial.residual, threaded.residual, Name(dtype));
      ExpectSame(expected, selection, Name(dtype));
    }
  }
}

TEST(AccumulatesAndFilters) {
  for (const DType dtype : kDTypes) {
    const Values gradient = Draw(dtype, Pattern::kSpread, kSize, 5);
    const AccumulateParams params{AccumulateRule::kMomentum, 1, 0.9f, 0, nullptr};
    for (const double threshold : {0.0, 1.0, 3.0}) {
      Memories serial, threaded;
      std::vector<int64_t> expected, indices;
      bool finite = false;
      EXPECT(AccumulateFilter(gradient.array(), params, threshold, SerialFor, serial.get(), &finite, &expected).ok(),
             "");
      finite = false;
      EXPECT(AccumulateFilter(gradient.array(), params, threshold, ThreadedFor, threaded.get(), &finite, &indices).ok(),
             Name(dtype));
      EXPECT(finite, Name(dtype));
      EXPECT_EQ(serial.residual, threaded.residual, Name(dtype));
      EXPECT_EQ(expected, indices, Name(dtype) << ", " << threshold);
    }
  }
}

// The same as two tensors with a gap between them.
TEST(AccumulatesAndSelectsTogether) {
  const int64_t first = 30000, gap = 1000, n = kSize + gap;
  const Values gradient = Draw(DType::kFloat32, Pattern::kSpread, kSize, 6);
  const AccumulateParams params{AccumulateRule::kMomentum, 1, 0.9f, 0, nullptr};
  const auto run = [&](const ParallelFor& parallel_for, double hint, Memories* memories, Selection* selection) {
    const auto* data = static_cast<const float*>(gradient.array().data);
    const Feedback feedback = memories->get(), rest{feedback.residual + first, feedback.velocity + first};
    const std::vector<Part> parts{{{data, first, DType::kFloat32}, params, feedback, 0},
                                  {{data + first, kSize - first, DType::kFloat32}, params, rest, first + gap}};
    bool finite[2] = {};
    EXPECT(AccumulateTopK(parts, n, {kCount, hint, 7}, parallel_for, finite, selection).ok(), hint);
    EXPECT(finite[0] && finite[1], hint);
  };
  Memories serial;
  Selection expected;
  run(SerialFor, 0, &serial, &expected);
  for (const double times : {0.0, 0.9, 1.01}) {
    Memories threaded;
    Selection selection;
    run(ThreadedFor, times * expected.threshold, &threaded, &selection);
    EXPECT_EQ(serial.residual, threaded.residual, times);
    EXPECT_EQ(serial.velocity, threaded.velocity, times);
    ExpectSame(expected, selection, "hint times " + std::to_string(times));
  }
}

// A gradient in two parts, and their residuals.
struct TwoParts {
  explicit TwoParts(const Values& gradient) {
    const auto* data = static_cast<const float*>(gradient.array().data);
    const AccumulateParams params{AccumulateRule::kResidual, 0.5f, 0, 0, nullptr};
    parts = {{{data, kFirst, DType::kFloat32}, params, {memories.residual.data(), nullptr}, 0},
             {{data + kFirst, kSize - kFirst, DType::kFloat32},
              params,
              {memories.residual.data() + kFirst, nullptr},
              kFirst}};
  }

  static constexpr int64_t kFirst = 30000;
  Memories memories;
  std::vector<Part> parts;
};

TEST(SelectsInAPartition) {
  const Values gradient = Draw(DType::kFloat32, Pattern::kSpread, kSize, 6);
  const auto run = [&](const PartitionParams& params, const ParallelFor& parallel_for, TwoParts* tensors) {
    bool finite[2] = {};
    Partitioned found;
    EXPECT_STATUS(StatusKind::kOk, AccumulatePartition(tensors->parts, params, parallel_for, finite, &found),
                  params.threshold);
    EXPECT(finite[0] && finite[1], params.threshold);
    return found;
  };
  for (const double threshold : {std::numeric_limits<double>::infinity(), 0.7, 0.26, 0.0}) {
    TwoParts first(gradient);
    const auto reaching =
        static_cast<double>(run({10001, 60000, threshold, -1, 0, 9}, SerialFor, &first).indices.size());
    for (const double share : {-1.0, reaching, 300.0, 20000.0}) {  // with most, the largest are selected instead
      for (const int64_t sample : {int64_t{2000}, kSize}) {
        const PartitionParams params{10001, 60000, threshold, share, sample, 9};
        const std::string where = std::to_string(threshold) + ", share " + std::to_string(share);
        TwoParts serial(gradient), threaded(gradient);
        const Partitioned expected = run(params, SerialFor, &serial), found = run(params, ThreadedFor, &threaded);
        EXPECT_EQ(serial.memories.residual, threaded.memories.residual, where);
        EXPECT_EQ(expected.indices, found.indices, where);
        EXPECT_EQ(expected.threshold, found.threshold, where);
        EXPECT_EQ(expected.base, found.base, where);
        EXPECT(expected.sketch == found.sketch, where);
      }
    }
  }
}

TEST(FiltersAndPacks) {
  const Values gradient = Draw(DType::kFloat32, Pattern::kSpread, kSize, 5);
  for (const FilterKind kind :
       {FilterKind::kThreshold, FilterKind::kWithTies, FilterKind::kExactly, FilterKind::kFitted}) {
    for (const double threshold : {0.3, 0.9, 3.0}) {
      for (const bool active : {true, false}) {
        const FilterParams filter{kind, threshold, kCount, {2, Distribution::kGamma, 4}};
        const AccumulateParams params{AccumulateRule::kResidual, 1, 0, 0, nullptr};
        Memories serial, threaded;
        Bytes expected, message;
        Filtered wanted, found;
        bool finite[2] = {};
        EXPECT_STATUS(StatusKind::kOk,
                      FilterAndPack({gradient.array(), params, serial.get(), 0}, active, filter, {}, Level::kMean,
                                    SerialFor, &expected, finite, &wanted),
                      threshold);
        EXPECT_STATUS(StatusKind::kOk,
                      FilterAndPack({gradient.array(), params, threaded.get(), 0}, active, filter, {}, Level::kMean,
                                    ThreadedFor, &message, finite + 1, &found),
                      threshold);
        EXPECT(finite[0] && finite[1], threshold);
        EXPECT_EQ(serial.residual, threaded.residual, threshold);
        EXPECT_EQ(wanted.threshold, found.threshold, threshold);
        EXPECT(expected == message, "kind " << static_cast<int>(kind) << ", " << threshold);
      }
    }
  }
}

TEST(AccumulatesAndPacks) {
  const Values gradient = Draw(DType::kFloat32, Pattern::kSpread, kSize, 6);
  const PayloadFormat format{kSize, kCount, Coding::kAuto, DType::kInt2};
  int64_t size = 0;
  EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "");
  for (const double hint : {0.0, 0.7, 100.0}) {
    for (const bool active : {true, false}) {
      TwoParts serial(gradient), threaded(gradient);
      Bytes expected(static_cast<size_t>(size)), payload(expected);
      bool finite[4] = {};
      Selection selection;
      EXPECT_STATUS(StatusKind::kOk,
                    AccumulateAndPack(serial.parts, active, {kCount, hint, 7}, format, Level::kMean, SerialFor,
                                      expected.data(), finite, &selection),
                    hint);
      EXPECT_STATUS(StatusKind::kOk,
                    AccumulateAndPack(threaded.parts, active, {kCount, hint, 7}, format, Level::kMean, ThreadedFor,
                                      payload.data(), finite + 2, &selection),
                    hint);
      EXPECT(finite[0] && finite[1] && finite[2] && finite[3], hint);
      EXPECT_EQ(serial.memories.residual, threaded.memories.residual, hint);
      EXPECT(expected == payload, "hint " << hint);
    }
  }
}

TEST(AddsPayloads) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt2}) {
    const PayloadFormat format{9 * 65536 + 77, 3000, Coding::kAuto, dtype};
    std::vector<Bytes> payloads;
    std::vector<Source> sources;
    for (uint64_t rank = 0; rank < 3; ++rank) {
      const auto indices = ChooseIndices(format.n, format.k, rank);
      payloads.push_back(BuildPayload(format, MakeContent(format, indices, rank)));
    }
    for (const Bytes& one : payloads) sources.push_back({one.data(), format.k, static_cast<int64_t>(one.size())});
    std::vector<float> serial(static_cast<size_t>(format.n), 7), threaded(serial);
    EXPECT(ReduceSources(format, sources, 0.5f, SerialFor, {{0, format.n, serial.data()}}).ok(), Name(dtype));
    EXPECT(ReduceSources(format, sources, 0.5f, ThreadedFor, {{0, format.n, threaded.data()}}).ok(), Name(dtype));
    for (size_t i = 0; i < serial.size(); ++i) {
      EXPECT(SameNumber(static_cast<double>(serial[i]), static_cast<double>(threaded[i])), Name(dtype) << ", " << i);
    }
    std::vector<float> sliced(static_cast<size_t>(format.n), 7);
    const int64_t cut = 5 * 65536 + 100;
    const std::vector<Slice> slices{{0, cut, sliced.data()}, {cut, format.n - cut, sliced.data() + cut}};
    EXPECT(ReduceSources(format, sources, 0.5f, ThreadedFor, slices).ok(), Name(dtype));
    EXPECT(std::memcmp(serial.data(), sliced.data(), 4 * sliced.size()) == 0, Name(dtype));
    Bytes gathered;
    for (const Bytes& one : payloads) gathered.insert(gathered.end(), one.begin(), one.end());
    std::vector<float> located(static_cast<size_t>(format.n), 7), strided(located);
    EXPECT(ReduceLocated({format}, 3, gathered.data(), static_cast<int64_t>(gathered.size()), 0.5f, ThreadedFor,
                         {located.data()})
               .ok(),
           Name(dtype));
    EXPECT(std::memcmp(serial.data(), located.data(), 4 * located.size()) == 0, Name(dtype));
    EXPECT(ReducePayloads(format, gathered.data(), 3, sources[0].size, 0.5f, ThreadedFor, strided.data()).ok(),
           Name(dtype));
    EXPECT(std::memcmp(serial.data(), strided.data(), 4 * strided.size()) == 0, Name(dtype));
  }
}

TEST(RefusesAllSumsForOnePayload) {
  const PayloadFormat format{70000, 300};
  Bytes good = BuildPayload(format, MakeContent(format, ChooseIndices(format.n, format.k, 1), 1)), bad = good;
  bad[40] ^= 1;
  const Source source{good.data(), format.k, static_cast<int64_t>(good.size())};
  const Source damaged{bad.data(), source.k, source.size};
  const std::vector<float> before(static_cast<size_t>(format.n), 7);
  for (const Cut& cut : AllCuts()) {
    std::vector<float> first = before, second = before;
    const std::vector<Sum> sums{{format, {source, source, source}, {{0, format.n, first.data()}}},
                                {format, {source, damaged, damaged}, {{0, format.n, second.data()}}}};
    const Status status = ReduceSums(sums, 1.0f, cut.run);
    EXPECT(status.message.find("from rank 1:") == 0, status.message);
    EXPECT(first == before && second == before, cut.name);
  }
}

}  // namespace
}  // namespace hvd_sparse
