#include "quantize.h"

#include <vector>

#include "arrays.h"
#include "expect.h"

namespace hvd_sparse {
namespace {

// Every non-negative finite number of a 16-bit type, ascending; the index is the bit pattern.
std::vector<double> FiniteNumbers(DType dtype) {
  std::vector<double> numbers;
  for (uint64_t bits = 0; bits < FieldsOf(dtype).infinity(); ++bits) numbers.push_back(Decode(dtype, bits));
  return numbers;
}

// Finds the nearest of `numbers` by search; of two equally near, the one whose last bit is zero. Doubles represent all
// differences exactly.
uint64_t Nearest(const std::vector<double>& numbers, DType dtype, float value) {
  const Fields fields = FieldsOf(dtype);
  const uint64_t sign = std::signbit(value) ? fields.sign() : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(value)) return sign | fields.infinity();
  const auto above =
      static_cast<uint64_t>(std::lower_bound(numbers.begin(), numbers.end(), magnitude) - numbers.begin());
  if (above == numbers.size()) return sign | (numbers.size() - 1);  // too large: the largest finite one
  if (above == 0) return sign;
  const double up = numbers[above] - magnitude, down = magnitude - numbers[above - 1];
  const bool rises = up < down || (up == down && above % 2 == 0);
  return sign | (rises ? above : above - 1);
}

uint64_t Convert(DType dtype, float value) {
  return dtype == DType::kFloat16 ? ToFloat16(value).bits : ToBFloat16(value).bits;
}

float Widen(DType dtype, uint16_t bits) {
  return dtype == DType::kFloat16 ? ToFloat(Float16{bits}) : ToFloat(BFloat16{bits});
}

uint32_t BitsOfFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

constexpr DType kNarrow[] = {DType::kFloat16, DType::kBFloat16};

TEST(EveryPatternWidensExactlyAndComesBack) {
  for (const DType dtype : kNarrow) {
    const Fields fields = FieldsOf(dtype);
    for (uint64_t bits = 0; bits < 65536; ++bits) {
      const float wide = Widen(dtype, static_cast<uint16_t>(bits));
      const double expected = Decode(dtype, bits);
      const uint64_t back = Convert(dtype, wide);
      if (std::isnan(expected)) {
        EXPECT(std::isnan(wide), Name(dtype) << " " << bits);
        EXPECT(std::isnan(Decode(dtype, back)), Name(dtype) << " " << bits << " came back as " << back);
        EXPECT_EQ(bits & fields.sign(), back & fields.sign(), "the sign of NaN " << bits);
      } else {
        EXPECT_EQ(BitsOfFloat(static_cast<float>(expected)), BitsOfFloat(wide), Name(dtype) << " " << bits);
        EXPECT_EQ(bits, back, Name(dtype) << " " << wide);
      }
    }
  }
}

TEST(RoundsToNearestEvenAroundEveryMidpoint) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const DType dtype : kNarrow) {
    const std::vector<double> numbers = FiniteNumbers(dtype);
    for (size_t i = 0; i + 1 < numbers.size(); ++i) {
      const double exact = (numbers[i] + numbers[i + 1]) / 2;
      const auto middle = static_cast<float>(exact);
      EXPECT_EQ(exact, static_cast<double>(middle), "a midpoint is a float32");
      EXPECT_EQ(static_cast<uint64_t>(i + i % 2), Convert(dtype, middle), "a tie goes to even");
      for (const float value : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, infinity)}) {
        EXPECT_EQ(Nearest(numbers, dtype, value), Convert(dtype, value), Name(dtype) << " of " << value);
        EXPECT_EQ(Nearest(numbers, dtype, -value), Convert(dtype, -value), Name(dtype) << " of " << -value);
      }
    }
  }
}

TEST(RoundsAnyFloatToTheNearest) {
  std::mt19937_64 random(1);
  for (const DType dtype : kNarrow) {
    const std::vector<double> numbers = FiniteNumbers(dtype);
    for (int i = 0; i < 300000; ++i) {
      const float value = BitsToFloat(static_cast<uint32_t>(random()));
      if (std::isnan(value)) continue;
      EXPECT_EQ(Nearest(numbers, dtype, value), Convert(dtype, value), Name(dtype) << " of " << value);
    }
  }
}

TEST(ExtremesSaturateButInfinityAndNanStay) {
  const float largest = std::numeric_limits<float>::max(), infinity = std::numeric_limits<float>::infinity();
  for (const float value : {65504.0f, 65519.996f, 65520.0f, 65536.0f, 1e9f, largest}) {
    EXPECT_EQ(uint64_t{0x7bff}, Convert(DType::kFloat16, value), value);
    EXPECT_EQ(uint64_t{0xfbff}, Convert(DType::kFloat16, -value), -value);
  }
  EXPECT_EQ(uint64_t{0x7f7f}, Convert(DType::kBFloat16, largest), "the largest float32");
  EXPECT_EQ(uint64_t{0xff7f}, Convert(DType::kBFloat16, -largest), "the lowest float32");
  const float smallest = std::numeric_limits<float>::denorm_min();
  for (const DType dtype : kNarrow) {
    const Fields fields = FieldsOf(dtype);
    EXPECT_EQ(fields.infinity(), Convert(dtype, infinity), Name(dtype));
    EXPECT_EQ(fields.sign() | fields.infinity(), Convert(dtype, -infinity), Name(dtype));
    EXPECT_EQ(uint64_t{0}, Convert(dtype, smallest), Name(dtype));
    EXPECT_EQ(fields.sign(), Convert(dtype, -smallest), "a negative zero of " << Name(dtype));
    const uint64_t one_nan = fields.infinity() | ((fields.mantissa_mask() + 1) >> 1);
    for (const uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffc00000u}) {  // a NaN of low bits alone, too
      const uint64_t sign = nan >> 31 != 0 ? fields.sign() : 0;
      EXPECT_EQ(sign | one_nan, Convert(dtype, BitsToFloat(nan)), Name(dtype) << " of " << nan);
    }
  }
}

TEST(NothingIsLeftWhereNoValuesTravel) {
  const std::vector<float> values{1, -0.0f, BitsToFloat(0x7fc00000u), BitsToFloat(0xff800000u)};
  std::vector<float> result(values.size(), 5.0f);
  Quantize(values.data(), 4, DType::kNone, result.data());
  for (const float one : result) EXPECT_EQ(0u, BitsOfFloat(one), "of 4");
}

TEST(QuantizeIsThereAndBack) {
  for (const DType dtype : kDTypes) {
    for (const int64_t n : {0, 1, 7, 65537}) {
      std::mt19937_64 random(static_cast<uint64_t>(n));
      std::vector<float> values(static_cast<size_t>(n));
      for (float& value : values) value = BitsToFloat(static_cast<uint32_t>(random()));
      std::vector<float> result(values.size(), 5.0f), in_place = values;
      Quantize(values.data(), n, dtype, result.data());
      Quantize(in_place.data(), n, dtype, in_place.data());
      for (size_t i = 0; i < values.size(); ++i) {
        const bool narrow = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
        const double expected = narrow ? Decode(dtype, Convert(dtype, values[i])) : static_cast<double>(values[i]);
        const bool same = std::isnan(expected) ? std::isnan(result[i]) : expected == static_cast<double>(result[i]);
        EXPECT(same, Name(dtype) << " of " << values[i] << " is " << result[i] << ", expected " << expected);
        EXPECT_EQ(BitsOfFloat(result[i]), BitsOfFloat(in_place[i]), "in place, " << Name(dtype) << " of " << values[i]);
      }
    }
  }
}

}  // namespace
}  // namespace hvd_sparse
