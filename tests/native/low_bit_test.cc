#include "low_bit.h"

#include <cmath>
#include <limits>
#include <string>

#include "expect.h"
#include "payloads.h"

namespace hvd_sparse {
namespace {

constexpr DType kLowBit[] = {DType::kInt2, DType::kInt1};
constexpr Level kLevels[] = {Level::kMean, Level::kMin};
constexpr float kHuge = std::numeric_limits<float>::max(), kTiny = std::numeric_limits<float>::denorm_min();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

const Segments kLayouts[] = {
    {}, {{0, 1}}, {{0, 7}}, {{0, 300}}, {{0, 1}, {1, 1}, {2, 5}, {50, 1}, {90, 40}, {130, 3}, {9000, 11}}};

struct Entries {
  std::string kind;
  std::vector<float> values;
};

// The values of k entries of every awkward kind.
std::vector<Entries> AllKinds(size_t k) {
  std::mt19937_64 random(k);
  std::vector<Entries> kinds{{"normal", {}}, {"zeros", {}}, {"mixed with zeros", {}}, {"equal", {}}, {"denormal", {}},
                             {"huge", {}},   {"ties", {}},  {"infinite", {}},         {"any", {}}};
  std::normal_distribution<float> normal;
  for (size_t j = 0; j < k; ++j) {
    const float sign = random() % 2 == 0 ? 1.0f : -1.0f, value = normal(random);
    kinds[0].values.push_back(value);
    kinds[1].values.push_back(sign * 0.0f);
    kinds[2].values.push_back(random() % 3 == 0 ? sign * 0.0f : value);
    kinds[3].values.push_back(sign * 0.1f);
    kinds[4].values.push_back(sign * kTiny * static_cast<float>(random() % 9));
    kinds[5].values.push_back(random() % 2 == 0 ? sign * kHuge : kHuge * std::tanh(value));
    kinds[6].values.push_back(sign * static_cast<float>(random() % 4));
    kinds[7].values.push_back(random() % 4 == 0 ? sign * kInfinity : value);
    kinds[8].values.push_back(
        BitsToFloat(static_cast<uint32_t>(DrawBits(DType::kFloat32, Pattern::kSpread, 0, 1, random))));
  }
  return kinds;
}

double MagnitudeOf(float value) { return std::fabs(static_cast<double>(value)); }

// The mean of the magnitudes, or the smallest, in the order in which they came; 0 of none.
double LevelOf(const std::vector<double>& magnitudes, Level level) {
  double sum = 0, least = kInfinity;
  for (const double magnitude : magnitudes) {
    sum += magnitude;
    least = std::min(least, magnitude);
  }
  if (magnitudes.empty()) return 0;
  return level == Level::kMean ? sum / static_cast<double>(magnitudes.size()) : least;
}

// The bits of each decoded value by the definition, each from all entries anew.
std::vector<uint64_t> QuantizedByHand(const std::vector<float>& values, const std::vector<int64_t>& indices,
                                      DType dtype, Level level, const Segments& segments) {
  std::vector<uint64_t> result;
  for (size_t j = 0; j < values.size(); ++j) {
    std::vector<double> group, same_class;
    for (size_t i = 0; i < values.size(); ++i) {
      const bool counts = values[i] != 0 && GroupOf(segments, indices[i]) == GroupOf(segments, indices[j]);
      if (counts) group.push_back(MagnitudeOf(values[i]));
    }
    const double mean = LevelOf(group, Level::kMean);
    for (const double magnitude : group) {
      const bool fellow = dtype == DType::kInt1 || (magnitude >= mean) == (MagnitudeOf(values[j]) >= mean);
      if (fellow) same_class.push_back(magnitude);
    }
    const auto magnitude = static_cast<float>(LevelOf(same_class, level));
    result.push_back(FloatToBits(std::signbit(values[j]) ? -magnitude : magnitude));
  }
  return result;
}

std::vector<uint64_t> BitsOfAll(const std::vector<float>& values) {
  std::vector<uint64_t> bits;
  for (const float value : values) bits.push_back(FloatToBits(value));
  return bits;
}

std::vector<float> Quantized(const std::vector<float>& values, const std::vector<int64_t>& indices, DType dtype,
                             Level level, const Segments& segments) {
  std::vector<float> result(values.size(), 5.0f);
  const auto k = static_cast<int64_t>(values.size());
  EXPECT_STATUS(StatusKind::kOk,
                QuantizeLowBit(values.data(), indices.data(), k, dtype, level, segments, result.data()), "");
  return result;
}

size_t SizeOf(DType dtype, size_t k, const Segments& segments) {
  return static_cast<size_t>(LowBitSize(dtype, static_cast<int64_t>(k), segments));
}

// Writes values that can be written into exactly their size, compares every byte, and reads them back.
void CheckThereAndBack(DType dtype, const std::vector<int64_t>& indices, const std::vector<float>& values,
                       const Segments& segments, const std::string& where) {
  const std::vector<uint64_t> bits = BitsOfAll(values);
  const Bytes expected = BuildLowBit(dtype, indices, bits, segments);
  const auto k = static_cast<int64_t>(values.size());
  EXPECT_EQ(expected.size(), SizeOf(dtype, values.size(), segments), where);
  if (expected.size() != SizeOf(dtype, values.size(), segments)) return;
  const std::unique_ptr<uint8_t[]> written(new uint8_t[expected.size()]());
  EXPECT_STATUS(StatusKind::kOk, WriteLowBit(values.data(), indices.data(), k, dtype, segments, written.get()), where);
  EXPECT_EQ(expected, Bytes(written.get(), written.get() + expected.size()), where);
  std::vector<float> read(values.size(), 5.0f);
  ReadLowBit(Exact(expected).get(), indices.data(), k, dtype, segments, read.data());
  EXPECT_EQ(bits, BitsOfAll(read), where);
}

TEST(SizesWorkedOutByHand) {
  const Segments three{{0, 3}}, nine{{0, 3}, {12, 1}, {20, 5}};
  EXPECT_EQ(size_t{4 + 1}, SizeOf(DType::kInt1, 1, {}), "a level and a bit");
  EXPECT_EQ(size_t{4 + 1}, SizeOf(DType::kInt1, 8, {}), "a level and a byte");
  EXPECT_EQ(size_t{4 + 2}, SizeOf(DType::kInt1, 9, {}), "a level and 9 bits");
  EXPECT_EQ(size_t{8 + 1}, SizeOf(DType::kInt2, 1, {}), "two levels and 2 bits");
  EXPECT_EQ(size_t{8 + 1}, SizeOf(DType::kInt2, 4, {}), "two levels and a byte");
  EXPECT_EQ(size_t{8 + 2}, SizeOf(DType::kInt2, 5, {}), "two levels and 10 bits");
  EXPECT_EQ(size_t{4 * 2 + 1}, SizeOf(DType::kInt1, 2, three), "two entries meet two groups of three");
  EXPECT_EQ(size_t{4 * 3 + 13}, SizeOf(DType::kInt1, 100, three), "three groups and 100 bits");
  EXPECT_EQ(size_t{8 * 9 + 25}, SizeOf(DType::kInt2, 100, nine), "3 + 1 + 5 groups and 200 bits");
  EXPECT_EQ(size_t{8 * 8 + 2}, SizeOf(DType::kInt2, 8, nine), "eight of nine groups and 16 bits");
  const int64_t most = int64_t{1} << 48;
  EXPECT_EQ(8 * most + most / 4, LowBitSize(DType::kInt2, most, {{0, most}}), "the most there can be");
}

TEST(QuantizesExamplesWorkedOutByHand) {
  const std::vector<float> values{-3, 1, 0, -0.0f, 2, -6};  // magnitudes 3, 1, 2, 6: a mean of 3
  const std::vector<int64_t> indices = Consecutive(0, 6);
  const auto check = [&](DType dtype, Level level, const Segments& segments, const std::vector<float>& expected) {
    EXPECT_EQ(BitsOfAll(expected), BitsOfAll(Quantized(values, indices, dtype, level, segments)),
              Name(dtype) << ", level " << static_cast<int>(level) << ", " << segments.size() << " segments");
  };
  check(DType::kInt1, Level::kMean, {}, {-3, 3, 3, -3, 3, -3});
  check(DType::kInt1, Level::kMin, {}, {-1, 1, 1, -1, 1, -1});
  check(DType::kInt2, Level::kMean, {}, {-4.5f, 1.5f, 1.5f, -1.5f, 1.5f, -4.5f});
  check(DType::kInt2, Level::kMin, {}, {-3, 1, 1, -1, 1, -3});
  check(DType::kInt1, Level::kMean, {{0, 2}}, {-2.5f, 3.5f, 2.5f, -3.5f, 2.5f, -3.5f});  // 3, 0, 2 and 1, 0, 6
  check(DType::kInt1, Level::kMean, {{0, 1}, {3, 3}}, {-2, 2, 2, -0.0f, 2, -6});         // 3, 1, 0; then 0; 2; 6
}

TEST(MeansHalfwayBetweenTwoFloatsAreRoundedToEven) {
  const float odd = BitsToFloat(0x3ffffffdu), even = BitsToFloat(0x3ffffffeu);
  std::vector<float> values(49, odd);  // a product with 1 / 98, rounded, would be below the middle
  values.insert(values.end(), 49, even);
  const std::vector<int64_t> indices = Consecutive(0, 98);
  EXPECT_EQ(std::vector<float>(98, even), Quantized(values, indices, DType::kInt1, Level::kMean, {}), "one level");
}

TEST(QuantizesAndTravelsAsDefined) {
  for (const size_t k : {1, 2, 3, 4, 5, 8, 9, 150}) {
    const std::vector<int64_t> spread = ChooseIndices(10000, static_cast<int64_t>(k), k);
    for (const auto& indices : {Consecutive(0, static_cast<int64_t>(k)), spread}) {
      for (const auto& [kind, values] : AllKinds(k)) {
        for (const Segments& segments : kLayouts) {
          for (const DType dtype : kLowBit) {
            for (const Level level : kLevels) {
              const std::string where = std::string(Name(dtype)) + ", " + kind + ", k = " + std::to_string(k) + ", " +
                                        std::to_string(segments.size()) + " segments, level " +
                                        std::to_string(static_cast<int>(level));
              const std::vector<float> sent = Quantized(values, indices, dtype, level, segments);
              EXPECT_EQ(QuantizedByHand(values, indices, dtype, level, segments), BitsOfAll(sent), where);
              CheckThereAndBack(dtype, indices, sent, segments, where);
            }
          }
        }
      }
    }
  }
}

TEST(QuantizesInPlace) {
  for (const auto& [kind, values] : AllKinds(150)) {
    for (const DType dtype : kLowBit) {
      const std::vector<int64_t> indices = ChooseIndices(10000, 150, 1);
      std::vector<float> in_place = values;
      const Status status =
          QuantizeLowBit(in_place.data(), indices.data(), 150, dtype, Level::kMean, kLayouts[4], in_place.data());
      EXPECT_STATUS(StatusKind::kOk, status, kind);
      EXPECT_EQ(BitsOfAll(Quantized(values, indices, dtype, Level::kMean, kLayouts[4])), BitsOfAll(in_place), kind);
    }
  }
}

TEST(WithoutSegmentsIndicesAreNotRead) {
  const float values[] = {1, -3};
  for (const DType dtype : kLowBit) {
    float result[2] = {5, 5};
    uint8_t bytes[16] = {};
    EXPECT_STATUS(StatusKind::kOk, QuantizeLowBit(values, nullptr, 2, dtype, Level::kMin, {}, result), "");
    EXPECT_STATUS(StatusKind::kOk, WriteLowBit(result, nullptr, 2, dtype, {}, bytes), "");
    float read[2] = {5, 5};
    ReadLowBit(bytes, nullptr, 2, dtype, {}, read);
    EXPECT_EQ(FloatToBits(1.0f), FloatToBits(read[0]), Name(dtype));
    EXPECT_EQ(FloatToBits(dtype == DType::kInt1 ? -1.0f : -3.0f), FloatToBits(read[1]), Name(dtype));
  }
}

TEST(NoValuesAreQuantizedToNone) {
  for (const Segments& segments : kLayouts) {
    for (const DType dtype : kLowBit) {
      EXPECT_STATUS(StatusKind::kOk, QuantizeLowBit(nullptr, nullptr, 0, dtype, Level::kMean, segments, nullptr), "");
      EXPECT_EQ(size_t{0}, SizeOf(dtype, 0, segments), segments.size());
    }
  }
}

TEST(TakesSegmentsThatFitAndRefusesOthers) {
  const Segments right[] = {{}, {{0, 1}}, {{0, 10}}, {{0, 3}}, {{0, 1}, {1, 9}}, {{0, 4}, {4, 1}, {9, 1}}};
  for (const Segments& segments : right) EXPECT_STATUS(StatusKind::kOk, CheckSegments(segments, 10), segments.size());
  const int64_t lowest = std::numeric_limits<int64_t>::min(), highest = std::numeric_limits<int64_t>::max();
  const Segments wrong[] = {{{1, 1}},                        // not from 0
                            {{-1, 1}},                       //
                            {{0, 0}},                        // no channels
                            {{0, -1}},                       //
                            {{0, 11}},                       // more channels than elements
                            {{0, highest}},                  //
                            {{0, 5}, {4, 1}},                // before another begins
                            {{0, 1}, {6, 5}},                // or ends
                            {{0, 1}, {4, 0}},                //
                            {{0, 1}, {5, 1}, {5, 1}},        // not ascending
                            {{0, 1}, {5, 1}, {4, 1}},        //
                            {{0, 1}, {10, 1}},               // from the end
                            {{0, 1}, {11, 1}},               // beyond it
                            {{0, 1}, {highest, 1}, {5, 1}},  //
                            {{0, 1}, {highest, highest}},    //
                            {{lowest, 1}},                   // no difference overflows
                            {{0, 1}, {lowest, 1}}};
  for (const Segments& segments : wrong) {
    std::string where;
    for (const Segment& one : segments) where += std::to_string(one.begin) + ":" + std::to_string(one.channels) + " ";
    EXPECT_STATUS(StatusKind::kInvalidArgument, CheckSegments(segments, 10), where);
    for (const DType dtype : kLowBit) {
      int64_t size = -1;
      EXPECT_STATUS(StatusKind::kInvalidArgument, PayloadSize({10, 3, Coding::kRunLength, dtype, segments}, &size),
                    where);
    }
  }
}

TEST(QuantizeRefusesSegmentsAndIndicesAndWritesNothing) {
  const int64_t lowest = std::numeric_limits<int64_t>::min(), highest = std::numeric_limits<int64_t>::max();
  const float values[] = {1, 2, 3};
  const int64_t good[] = {0, 4, 9};
  const Segments fine{{0, 2}};
  const auto check = [&](const int64_t* indices, const Segments& segments, const std::string& where) {
    for (const DType dtype : kLowBit) {
      float result[] = {5, 5, 5};
      EXPECT_STATUS(StatusKind::kInvalidArgument,
                    QuantizeLowBit(values, indices, 3, dtype, Level::kMean, segments, result), where);
      EXPECT(std::count(result, result + 3, 5.0f) == 3, where);
    }
  };
  check(good, {{1, 1}}, "not from 0");
  check(good, {{0, 0}}, "no channels");
  check(good, {{0, -3}}, "fewer than none");
  check(good, {{0, 1}, {5, highest}}, "more channels than there can be elements");
  check(good, {{lowest, 1}}, "far below 0");
  const int64_t far[] = {0, 1, highest};
  check(far, {{0, 1}}, "an index that no tensor has");
  check(good, {{0, 2}, {1, 1}}, "before another begins");
  check(good, {{0, 1}, {5, 1}, {5, 1}}, "not ascending");
  const int64_t wrong[][3] = {{0, 0, 1}, {1, 2, 2}, {4, 3, 9}, {-1, 0, 1}, {-5, -4, -3}};
  for (const auto& indices : wrong) check(indices, fine, "from " + std::to_string(indices[0]));
}

TEST(RefusesValuesThatWereNotQuantized) {
  const auto check = [](bool good, DType dtype, const std::vector<float>& values, const Segments& segments) {
    Bytes bytes(SizeOf(dtype, values.size(), segments));
    const std::vector<int64_t> indices = Consecutive(0, static_cast<int64_t>(values.size()));
    const Status status =
        WriteLowBit(values.data(), indices.data(), static_cast<int64_t>(values.size()), dtype, segments, bytes.data());
    EXPECT_STATUS(good ? StatusKind::kOk : StatusKind::kInvalidArgument, status, Name(dtype) << ", " << values.back());
  };
  check(true, DType::kInt1, {2, -2, 2}, {});
  check(false, DType::kInt1, {2, -2, 3}, {});
  check(false, DType::kInt1, {2, 0}, {});
  check(false, DType::kInt1, {1, std::nextafter(1.0f, 2.0f)}, {});
  check(true, DType::kInt1, {2, 3, -2}, {{0, 2}});
  check(false, DType::kInt1, {2, 3, 3}, {{0, 2}});
  check(true, DType::kInt2, {2, -3, -2, 3}, {});
  check(false, DType::kInt2, {2, -3, 4}, {});
  check(false, DType::kInt2, {2, 3, 0}, {});
  check(true, DType::kInt2, {2, 3, 4, 5}, {{0, 2}});
  check(false, DType::kInt2, {2, 3, 4, 3, 6}, {{0, 2}});
}

TEST(AnyBytesAreReadInsideTheirSection) {
  std::mt19937_64 random(17);
  for (int trial = 0; trial < 4000; ++trial) {
    const DType dtype = kLowBit[trial % 2];
    const Segments& segments = kLayouts[random() % 5];
    const auto k = static_cast<int64_t>(random() % 40 + 1);
    const std::vector<int64_t> indices = ChooseIndices(trial % 3 == 0 ? k : 10000, k, random());
    Bytes noise(SizeOf(dtype, indices.size(), segments));
    for (uint8_t& byte : noise) byte = static_cast<uint8_t>(random() % 4 == 0 ? 0xff : random());
    const std::unique_ptr<float[]> read(new float[indices.size()]);
    ReadLowBit(Exact(noise).get(), indices.data(), k, dtype, segments, read.get());
    EXPECT_EQ(ParseLowBit(dtype, indices, segments, noise, 0),
              BitsOfAll(std::vector<float>(read.get(), read.get() + k)), "noise " << trial);
  }
}

}  // namespace
}  // namespace hvd_sparse
