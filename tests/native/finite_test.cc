#include "finite.h"

#include "arrays.h"
#include "cuts.h"
#include "expect.h"

namespace hvd_sparse {
namespace {

// A residual is float32: a float64 that rounds to its infinity is none.
bool FitsFloat32(double value) {
  constexpr double kHalfway = 0x1.ffffffp127;  // between the largest float32 and 2^128; a tie goes to even, upwards
  return std::fabs(value) < kHalfway;          // false for NaN
}

bool AllFit(const Values& values) {
  for (int64_t i = 0; i < values.size(); ++i) {
    if (!FitsFloat32(values.At(i))) return false;
  }
  return true;
}

TEST(MatchesALoop) {
  for (const DType dtype : kDTypes) {
    for (const Pattern pattern : kPatterns) {
      for (const int64_t n : {0, 1, 2, 63, 4095, 4096, 4097, 65535, 65536, 65537, 131072}) {
        const Values values = Draw(dtype, pattern, n, static_cast<uint64_t>(n));
        for (const Cut& cut : AllCuts()) {
          EXPECT_EQ(AllFit(values), AllFinite(values.array(), cut.run),
                    Name(dtype) << ", " << Name(pattern) << ", n = " << n << ", " << cut.name);
        }
      }
    }
  }
}

TEST(FindsASingleOneAnywhere) {
  for (const DType dtype : kDTypes) {
    const Fields fields = FieldsOf(dtype);
    const uint64_t culprits[] = {fields.infinity(), fields.infinity() | fields.sign(), fields.infinity() | 1,
                                 fields.sign() | fields.infinity() | fields.mantissa_mask()};
    for (const int64_t n : {1, 31, 4096, 4097, 65537, 131072}) {
      Values values = Draw(dtype, Pattern::kDenormals, n, 3);
      EXPECT(AllFinite(values.array(), SerialFor), Name(dtype) << ", n = " << n);
      for (const int64_t at : {int64_t{0}, n / 3, n / 2, n - 2, n - 1}) {
        for (const uint64_t culprit : culprits) {
          values.Set(std::max<int64_t>(at, 0), culprit);
          for (const Cut& cut : AllCuts()) {
            EXPECT(!AllFinite(values.array(), cut.run), Name(dtype)
                                                            << ", n = " << n << ", at " << at << ", " << cut.name);
          }
          values.Set(std::max<int64_t>(at, 0), 0);
        }
      }
    }
  }
}

TEST(LargestFiniteIsFinite) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    Values values(dtype, 100);
    for (int64_t i = 0; i < 100; ++i) values.Set(i, FieldsOf(dtype).infinity() - 1);
    EXPECT(AllFinite(values.array(), SerialFor), Name(dtype));
  }
}

TEST(ADoubleBeyondFloat32Overflows) {
  const double halfway = 0x1.ffffffp127;
  const std::pair<double, bool> cases[] = {{0x1.fffffep127, true}, {std::nextafter(halfway, 0.0), true},
                                           {halfway, false},       {1e300, false},
                                           {-1e300, false},        {5e-324, true},
                                           {0x1p-149, true},       {-0x1.fffffep127, true}};
  for (const auto& [value, finite] : cases) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    Values values(DType::kFloat64, 5);
    values.Set(3, bits);
    EXPECT_EQ(finite, AllFinite(values.array(), SerialFor), "for " << value);
  }
}

}  // namespace
}  // namespace hvd_sparse
