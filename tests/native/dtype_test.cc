// Compares conversions of every type to float32, to ordered integers, and back, with the definitions in arrays.h.
#include "dtype.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "arrays.h"
#include "expect.h"

namespace hvd_sparse {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool Same(double expected, double received) {
  if (std::isnan(expected)) return std::isnan(received);
  return expected == received && std::signbit(expected) == std::signbit(received);
}

TEST(EveryNumberOf16BitsWidens) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto narrow = static_cast<uint16_t>(bits);
    const double half = Decode(DType::kFloat16, bits), brain = Decode(DType::kBFloat16, bits);
    EXPECT(Same(half, static_cast<double>(ToFloat(Float16{narrow}))), "float16 " << bits);
    EXPECT(Same(brain, static_cast<double>(ToFloat(BFloat16{narrow}))), "bfloat16 " << bits);
    EXPECT_EQ(bits & 0x7fffu, uint32_t{MagnitudeBits(Float16{narrow})}, "float16 " << bits);
    if (std::isfinite(half)) EXPECT_EQ(std::fabs(half), MagnitudeFromBits(Float16{}, narrow & 0x7fff), bits);
    if (std::isfinite(brain)) EXPECT_EQ(std::fabs(brain), MagnitudeFromBits(BFloat16{}, narrow & 0x7fff), bits);
  }
}

TEST(BitsOfFloatsAreThoseOfTheirNumbers) {
  std::mt19937_64 random(1);
  for (const Pattern pattern : kPatterns) {
    for (int i = 0; i < 2000; ++i) {
      const auto bits = static_cast<uint32_t>(DrawBits(DType::kFloat32, pattern, i, 2000, random));
      const double number = Decode(DType::kFloat32, bits);
      EXPECT(Same(number, static_cast<double>(BitsToFloat(bits))), bits);
      EXPECT_EQ(bits & 0x7fffffffu, MagnitudeBits(BitsToFloat(bits)), bits);
      if (!std::isnan(number)) EXPECT_EQ(std::fabs(number), MagnitudeFromBits(float{}, bits & 0x7fffffffu), bits);
      const uint64_t wide = DrawBits(DType::kFloat64, pattern, i, 2000, random);
      const double value = Decode(DType::kFloat64, wide);
      if (!std::isnan(value)) EXPECT_EQ(std::fabs(value), MagnitudeFromBits(double{}, MagnitudeBits(value)), wide);
    }
  }
}

// The smallest magnitude that reaches a threshold does, and the one before it does not.
template <typename T>
void CheckReaching(DType dtype, double threshold) {
  const BitsOf<T> found = SmallestReaching<T>(threshold);
  EXPECT(found <= kInfinityBits<T> && Decode(dtype, found) >= threshold, Name(dtype) << ", " << threshold);
  if (found > 0) EXPECT(Decode(dtype, found - uint64_t{1}) < threshold, Name(dtype) << ", " << threshold);
}

TEST(TheSmallestThatReachesAThreshold) {
  std::mt19937_64 random(2);
  std::vector<double> thresholds{0.0,     -0.0,    5e-324, 1e-45,  1e-40, 0x1p-24,  0x1p-25,
                                 65504.0, 65505.0, 3.4e38, 3.5e38, 1e300, kInfinity};
  for (const DType dtype : kDTypes) {
    for (int i = 0; i < 500; ++i) {
      const double one = std::fabs(Decode(dtype, DrawBits(dtype, Pattern::kAnyBits, i, 500, random)));
      if (std::isnan(one)) continue;
      for (const double near : {one, std::nextafter(one, kInfinity), std::nextafter(one, 0.0)}) {
        thresholds.push_back(near);
      }
    }
  }
  for (const double threshold : thresholds) {
    CheckReaching<float>(DType::kFloat32, threshold);
    CheckReaching<double>(DType::kFloat64, threshold);
    CheckReaching<Float16>(DType::kFloat16, threshold);
    CheckReaching<BFloat16>(DType::kBFloat16, threshold);
  }
}

TEST(SizesAndTypesOfArrays) {
  const int64_t sizes[] = {4, 8, 2, 2, 0, 0, 0};
  for (int number = 0; number < 7; ++number) {
    EXPECT_EQ(sizes[number], ItemSize(static_cast<DType>(number)), "type " << number);
  }
  EXPECT_EQ(int64_t{0}, ItemSize(static_cast<DType>(200)), "no type");
  for (const DType dtype : kDTypes) {
    const Values values = Draw(dtype, Pattern::kSpread, 3, 3);
    const auto read = [](const auto* data) { return static_cast<double>(ToFloat(data[2])); };
    EXPECT_EQ(static_cast<double>(static_cast<float>(values.At(2))), Dispatch(values.array(), read), Name(dtype));
  }
}

}  // namespace
}  // namespace hvd_sparse
