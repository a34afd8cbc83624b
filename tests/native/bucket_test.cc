#include "bucket.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cuts.h"
#include "expect.h"
#include "joined.h"
#include "members.h"
#include "payloads.h"

namespace hvd_sparse {
namespace {

// The same, divided into members.
struct Cutting {
  Cutting(const Shape& shape, const Joined& joined, bool contiguous)
      : residuals(shape, joined.residual, contiguous), velocities(shape, joined.velocity, !contiguous) {
    const bool is_plain = joined.params.rule == AccumulateRule::kResidual;
    for (size_t i = 0; i < shape.members.size(); ++i) {
      const auto [begin, size] = shape.members[i];
      const Array whole = joined.gradient.array();
      const auto* data = static_cast<const uint8_t*>(whole.data) + begin * ItemSize(whole.dtype);
      AccumulateParams params = joined.params;
      params.parameter += begin;
      const Feedback feedback{residuals.data(i), is_plain ? nullptr : velocities.data(i)};
      parts.push_back({{data, size, whole.dtype}, params, feedback, begin});
    }
  }

  // As vector<bool> has no data().
  std::unique_ptr<bool[]> NoneFinite() const { return std::make_unique<bool[]>(parts.size() + 1); }

  void ExpectFinite(const bool* finite, const std::string& where) const {
    for (size_t i = 0; i < parts.size(); ++i) {
      Floats residual(static_cast<size_t>(parts[i].gradient.size)), velocity(residual);
      const bool expected =
          Accumulate(parts[i].gradient, parts[i].params, SerialFor, {residual.data(), velocity.data()});
      EXPECT_EQ(expected, finite[i], where << ", member " << i);
    }
  }

  Members residuals, velocities;
  std::vector<Part> parts;
};

void ExpectSame(const Selection& expected, const Selection& received, const std::string& where) {
  EXPECT_EQ(expected.indices, received.indices, where);
  EXPECT_EQ(expected.threshold, received.threshold, where);
  EXPECT_EQ(expected.passed, received.passed, where);
}

void CheckTogether(const Shape& shape, DType dtype, Pattern pattern, const Rule& rule, const SelectParams& select,
                   const std::string& where) {
  for (const Cut& cut : AllCuts()) {
    Joined joined(shape, dtype, pattern, rule);
    const bool contiguous = select.k % 2 == 0;
    Cutting cutting(shape, joined, contiguous);
    Selection expected, received;
    bool all_finite = false;
    EXPECT_STATUS(StatusKind::kOk,
                  AccumulateTopK(joined.gradient.array(), joined.params, select, cut.run, joined.feedback(),
                                 &all_finite, &expected),
                  where);
    const auto finite = cutting.NoneFinite();
    EXPECT_STATUS(StatusKind::kOk, AccumulateTopK(cutting.parts, shape.n, select, cut.run, finite.get(), &received),
                  where);
    ExpectSame(expected, received, where + ", " + cut.name);
    cutting.residuals.ExpectEqual(joined.residual, where);
    cutting.velocities.ExpectEqual(joined.velocity, where);
    cutting.ExpectFinite(finite.get(), where);
    EXPECT_EQ(all_finite, std::all_of(finite.get(), finite.get() + cutting.parts.size(), [](bool one) { return one; }),
              where);
  }
}

TEST(PartsAreOneTensor) {
  for (const Shape& shape : kShapes) {
    for (const Rule& rule : kRules) {
      for (const DType dtype : kDTypes) {
        for (const Pattern pattern : {Pattern::kSpread, Pattern::kTies, Pattern::kMixed}) {
          Joined joined(shape, dtype, pattern, rule);
          Accumulate(joined.gradient.array(), joined.params, SerialFor, joined.feedback());
          for (const int64_t k : {int64_t{1}, int64_t{30}, int64_t{31}, shape.n}) {
            Selection selection;
            EXPECT(SelectTopK(joined.residuals(), {k, 0, 7}, SerialFor, &selection).ok(), k);
            for (const double times : {0.0, 0.98, 1.01, 1e9}) {  // none, good, a miss, a bad miss
              if (!expect::Chosen(12)) continue;
              const std::string where = std::string(shape.name) + ", " + rule.name + ", " + Name(dtype) + ", " +
                                        Name(pattern) + ", k = " + std::to_string(k) + ", hint times " +
                                        std::to_string(times);
              CheckTogether(shape, dtype, pattern, rule, {k, times * selection.threshold, 7}, where);
            }
          }
        }
      }
    }
  }
}

// Parts may differ in type, factor and rule. Each reports separately whether its gradient was finite.
TEST(PartsMayDiffer) {
  const Shape shape{"four", 900, {{0, 300}, {300, 100}, {450, 250}, {700, 200}}};
  for (size_t spoilt = 0; spoilt <= 4; ++spoilt) {
    for (const double hint : {0.0, 1.5, 1e9}) {
      Floats residual = DrawFloats(shape, 2), velocity = DrawFloats(shape, 3);
      Members residuals(shape, residual, spoilt % 2 == 0), velocities(shape, velocity, false);
      std::vector<Values> gradients;
      std::vector<Part> parts;
      for (size_t i = 0; i < 4; ++i) {
        const auto [begin, size] = shape.members[i];
        gradients.push_back(Draw(kDTypes[i], Pattern::kSpread, size, i));
        if (i == spoilt) gradients[i].Set(size / 2, FieldsOf(kDTypes[i]).infinity());
        AccumulateParams params = kRules[i % 2].params;
        params.factor = static_cast<float>(i) + 0.5f;
        parts.push_back({gradients[i].array(), params, {residuals.data(i), velocities.data(i)}, begin});
        EXPECT_EQ(i != spoilt,
                  Accumulate(gradients[i].array(), params, SerialFor,
                             {&residual[static_cast<size_t>(begin)], &velocity[static_cast<size_t>(begin)]}),
                  i);
      }
      Selection expected, received;
      bool finite[4] = {};
      EXPECT(SelectTopK({residual.data(), 900, DType::kFloat32}, {50, hint, 7}, ThreadedFor, &expected).ok(), hint);
      EXPECT(AccumulateTopK(parts, 900, {50, hint, 7}, ThreadedFor, finite, &received).ok(), hint);
      ExpectSame(expected, received, "hint " + std::to_string(hint));
      residuals.ExpectEqual(residual, "four");
      velocities.ExpectEqual(velocity, "four");
      for (size_t i = 0; i < 4; ++i) EXPECT_EQ(i != spoilt, finite[i], i);
    }
  }
}

TEST(NoPartsAreZeros) {
  for (const double hint : {0.0, 1.0}) {
    Selection selection;
    EXPECT_STATUS(StatusKind::kOk, AccumulateTopK({}, 100, {3, hint, 7}, ThreadedFor, nullptr, &selection), hint);
    EXPECT_EQ((std::vector<int64_t>{0, 1, 2}), selection.indices, hint);
    EXPECT_EQ(0.0, selection.threshold, hint);
  }
}

// The payload by the parts of the core that payload_test.cc and low_bit_test.cc check.
Bytes PackByHand(const PayloadFormat& format, const std::vector<int64_t>& indices, const Floats& residual,
                 Level level) {
  Floats values;
  for (const int64_t index : indices) values.push_back(residual[static_cast<size_t>(index)]);
  if (IsLowBit(format.dtype)) {
    EXPECT(QuantizeLowBit(values.data(), indices.data(), format.k, format.dtype, level, format.segments, values.data())
               .ok(),
           "quantize");
  }
  const std::vector<double> wide(values.begin(), values.end());
  const void* sent = values.data();
  if (format.dtype == DType::kFloat64) sent = wide.data();
  int64_t size = 0;
  EXPECT(PayloadSize(format, &size).ok(), "size");
  Bytes payload(static_cast<size_t>(size));
  EXPECT(Pack(format, indices.data(), sent, format.k, payload.data()).ok(), "pack");
  return payload;
}

void CheckPacked(const Shape& shape, const PayloadFormat& format, bool active, Level level, const std::string& where) {
  for (const Cut& cut : AllCuts()) {
    const Rule& rule = kRules[static_cast<size_t>(format.k) % kRules.size()];
    Joined joined(shape, DType::kFloat16, Pattern::kMixed, rule);
    Cutting cutting(shape, joined, level == Level::kMin);
    if (active) Accumulate(joined.gradient.array(), joined.params, SerialFor, joined.feedback());
    const SelectParams select{format.k, 2.0, 9};
    Selection expected, received;
    EXPECT(SelectTopK(joined.residuals(), select, cut.run, &expected).ok(), where);
    const Bytes payload = PackByHand(format, expected.indices, joined.residual, level);
    const std::unique_ptr<uint8_t[]> out(new uint8_t[payload.size()]);
    std::fill_n(out.get(), payload.size(), uint8_t{0xEE});
    const auto finite = cutting.NoneFinite();
    EXPECT_STATUS(
        StatusKind::kOk,
        AccumulateAndPack(cutting.parts, active, select, format, level, cut.run, out.get(), finite.get(), &received),
        where);
    EXPECT_EQ(payload, Bytes(out.get(), out.get() + payload.size()), where << ", " << cut.name);
    EXPECT(received.indices.empty(), where);
    EXPECT_EQ(expected.threshold, received.threshold, where);
    EXPECT_EQ(expected.passed, received.passed, where);
    cutting.ExpectFinite(finite.get(), where);
    cutting.residuals.ExpectEqual(joined.residual, where);
    cutting.velocities.ExpectEqual(joined.velocity, where);
  }
}

TEST(AccumulatesAndPacks) {
  const DType dtypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16,
                          DType::kInt2,    DType::kInt1,    DType::kNone};
  for (const Shape& shape : kShapes) {
    for (const DType dtype : dtypes) {
      for (const Coding coding : {Coding::kRunLength, Coding::kDense, Coding::kAuto}) {
        for (const int64_t k : {1, 60, 301, 3000}) {
          if (coding == Coding::kDense && k != shape.n) continue;
          const Segments segments = IsLowBit(dtype) ? Segments{{0, 7}, {1000, 50}} : Segments{};
          for (const bool active : {true, false}) {
            for (const Level level : {Level::kMean, Level::kMin}) {
              if (!expect::Chosen(8)) continue;
              CheckPacked(shape, {shape.n, k, coding, dtype, segments}, active, level,
                          std::string(shape.name) + ", " + Name(dtype) + ", " + Name(coding) +
                              ", k = " + std::to_string(k) + (active ? "" : ", inactive"));
            }
          }
        }
      }
    }
  }
}

struct Slices {
  Slices(const Shape& shape, const Floats& residual, const Floats& velocity, bool has_velocities)
      : residuals(shape, residual, has_velocities), velocities(shape, velocity, false) {
    for (size_t i = 0; i < shape.members.size(); ++i) {
      const auto [begin, size] = shape.members[i];
      get.push_back({begin, size, {residuals.data(i), has_velocities ? velocities.data(i) : nullptr}});
    }
  }

  Members residuals, velocities;
  std::vector<FeedbackSlice> get;
};

void CheckCleared(const Shape& shape, const PayloadFormat& format, bool has_velocities, bool is_empty, float kept = 0) {
  const std::string where = std::string(shape.name) + ", " + Name(format.dtype) + ", k = " + std::to_string(format.k) +
                            ", kept = " + std::to_string(kept);
  const auto indices = is_empty ? std::vector<int64_t>{} : ChooseIndices(format.n, format.k, 1);
  const Content content = MakeContent(format, indices, 2);
  const Bytes bytes = BuildPayload(format, content);
  Floats residual = DrawFloats(shape, 2), velocity = DrawFloats(shape, 3);
  Slices slices(shape, residual, velocity, has_velocities);
  for (size_t j = 0; j < indices.size(); ++j) {
    const auto at = static_cast<size_t>(indices[j]);
    const auto sent = static_cast<float>(Decode(format.dtype, content.values[j]));
    residual[at] = format.dtype == DType::kFloat32 ? 0.0f : residual[at] - sent;
    if (kept > 0) residual[at] += kept * sent;
    if (has_velocities) velocity[at] = 0.0f;
  }
  EXPECT_STATUS(StatusKind::kOk, ClearSent(format, Exact(bytes).get(), slices.get, kept), where);
  slices.residuals.ExpectEqual(residual, where);
  slices.velocities.ExpectEqual(velocity, where);
}

TEST(ClearsWhatWasSent) {
  for (const Shape& shape : kShapes) {
    for (const DType dtype : kWithLowBit) {
      for (const Coding coding : kCodings) {
        for (const int64_t k : {1, 60, 3000}) {
          for (const bool has_velocities : {false, true}) {
            for (const bool is_empty : {false, true}) {
              if (!expect::Chosen(6)) continue;
              CheckCleared(shape, {shape.n, k, coding, dtype}, has_velocities, is_empty);
              CheckCleared(shape, {shape.n, k, coding, dtype}, has_velocities, is_empty, 0.7f);
            }
          }
        }
      }
    }
  }
  CheckCleared({"nothing", 3000, {}}, {3000, 60, Coding::kRunLength, DType::kFloat16}, true, false);
}

TEST(ADamagedPayloadClearsNothing) {
  const Shape& shape = kShapes[2];
  const PayloadFormat format{shape.n, 60, Coding::kRunLength, DType::kFloat16};
  Bytes bytes = BuildPayload(format, MakeContent(format, ChooseIndices(format.n, format.k, 1), 2));
  bytes.back() ^= 1;
  const Floats residual = DrawFloats(shape, 2), velocity = DrawFloats(shape, 3);
  Slices slices(shape, residual, velocity, true);
  EXPECT_STATUS(StatusKind::kCorruptPayload, ClearSent(format, bytes.data(), slices.get), "damaged");
  EXPECT_STATUS(StatusKind::kInvalidArgument, ClearSent({shape.n, 0}, bytes.data(), slices.get), "k = 0");
  slices.residuals.ExpectEqual(residual, "damaged");
  slices.velocities.ExpectEqual(velocity, "damaged");
}

TEST(RefusesWithoutTouching) {
  const Shape& shape = kShapes[2];
  Joined joined(shape, DType::kFloat32, Pattern::kSpread, kRules[1]);
  Cutting cutting(shape, joined, true);
  const auto finite = cutting.NoneFinite();
  Selection selection;
  for (const double hint : {0.0, 1.0}) {
    for (const int64_t k : {int64_t{0}, int64_t{-1}, shape.n + 1}) {
      const SelectParams select{k, hint, 0};
      EXPECT_STATUS(StatusKind::kInvalidArgument,
                    AccumulateTopK(cutting.parts, shape.n, select, SerialFor, finite.get(), &selection), k);
      for (const bool active : {true, false}) {
        EXPECT_STATUS(StatusKind::kInvalidArgument,
                      AccumulateAndPack(cutting.parts, active, select, {shape.n, k}, Level::kMean, SerialFor, nullptr,
                                        finite.get(), &selection),
                      k);
      }
    }
  }
  uint8_t payload[400];
  for (const Segments& segments : {Segments{{1, 1}}, Segments{{0, 9}, {0, 9}}, Segments{{0, shape.n + 1}}}) {
    EXPECT_STATUS(StatusKind::kInvalidArgument,
                  AccumulateAndPack(cutting.parts, true, {3, 0, 0}, {shape.n, 3, Coding::kAuto, DType::kInt2, segments},
                                    Level::kMean, SerialFor, payload, finite.get(), &selection),
                  segments.size());
  }
  cutting.residuals.ExpectEqual(joined.residual, "nothing has happened");
  cutting.velocities.ExpectEqual(joined.velocity, "nothing has happened");
}

}  // namespace
}  // namespace hvd_sparse
