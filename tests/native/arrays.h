// Test arrays of all four element types, written and read bit by bit, without the conversions of the core.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "dtype.h"

namespace hvd_sparse {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
constexpr DType kWithLowBit[] = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                                 DType::kBFloat16, DType::kInt2,    DType::kInt1};

inline const char* Name(DType dtype) {
  static const char* const kNames[] = {"float32", "float64", "float16", "bfloat16", "none", "int2", "int1"};
  return kNames[static_cast<size_t>(dtype)];
}

// The fields of an IEEE 754 type, from its definition. Low-bit values are float32 on either side of the wire.
struct Fields {
  int exponent_bits, mantissa_bits;

  int sign_shift() const { return exponent_bits + mantissa_bits; }
  uint64_t highest_exponent() const { return (uint64_t{1} << exponent_bits) - 1; }
  uint64_t mantissa_mask() const { return (uint64_t{1} << mantissa_bits) - 1; }
  uint64_t infinity() const { return highest_exponent() << mantissa_bits; }
  uint64_t sign() const { return uint64_t{1} << sign_shift(); }
  uint64_t one() const { return (highest_exponent() >> 1) << mantissa_bits; }
};

inline Fields FieldsOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return {11, 52};
    case DType::kFloat16: return {5, 10};
    case DType::kBFloat16: return {8, 7};
    default: break;
  }
  return {8, 23};
}

// The number with these bits. A double can represent every number of every type.
inline double Decode(DType dtype, uint64_t bits) {
  const Fields fields = FieldsOf(dtype);
  const uint64_t mantissa = bits & fields.mantissa_mask();
  const uint64_t exponent = (bits >> fields.mantissa_bits) & fields.highest_exponent();
  double magnitude;
  if (exponent == fields.highest_exponent()) {
    magnitude = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else {
    const uint64_t whole = exponent == 0 ? mantissa : mantissa | (fields.mantissa_mask() + 1);
    const int bias = (1 << (fields.exponent_bits - 1)) - 1;
    const int power = static_cast<int>(exponent == 0 ? 1 : exponent) - bias - fields.mantissa_bits;
    magnitude = std::ldexp(static_cast<double>(whole), power);
  }
  return (bits & fields.sign()) != 0 ? -magnitude : magnitude;
}

// In exactly n * ItemSize bytes of the heap, so that AddressSanitizer sees the first byte read past the end.
class Values {
 public:
  Values(DType dtype, int64_t n) : dtype_(dtype), n_(n), bytes_(new uint8_t[static_cast<size_t>(n * ItemSize(dtype))]) {
    std::memset(bytes_.get(), 0, static_cast<size_t>(n * ItemSize(dtype)));
  }

  void Set(int64_t i, uint64_t bits) {
    std::memcpy(&bytes_[static_cast<size_t>(i * ItemSize(dtype_))], &bits, static_cast<size_t>(ItemSize(dtype_)));
  }

  double At(int64_t i) const {
    uint64_t bits = 0;
    std::memcpy(&bits, &bytes_[static_cast<size_t>(i * ItemSize(dtype_))], static_cast<size_t>(ItemSize(dtype_)));
    return Decode(dtype_, bits);
  }

  double Magnitude(int64_t i) const { return std::fabs(At(i)); }
  int64_t size() const { return n_; }
  DType dtype() const { return dtype_; }
  Array array() const { return {bytes_.get(), n_, dtype_}; }

 private:
  DType dtype_;
  int64_t n_;
  std::unique_ptr<uint8_t[]> bytes_;
};

enum class Pattern { kSpread, kZeros, kConstant, kTies, kMixed, kDenormals, kSparse, kAscending, kNan, kAnyBits };
constexpr Pattern kPatterns[] = {Pattern::kSpread, Pattern::kZeros,     Pattern::kConstant, Pattern::kTies,
                                 Pattern::kMixed,  Pattern::kDenormals, Pattern::kSparse,   Pattern::kAscending,
                                 Pattern::kNan,    Pattern::kAnyBits};

inline const char* Name(Pattern pattern) {
  static const char* const kNames[] = {"spread",    "zeros",  "constant",  "ties", "mixed",
                                       "denormals", "sparse", "ascending", "nan",  "any bits"};
  return kNames[static_cast<size_t>(pattern)];
}

// Element i of n of a pattern, with a random sign.
inline uint64_t DrawBits(DType dtype, Pattern pattern, int64_t i, int64_t n, std::mt19937_64& random) {
  const Fields fields = FieldsOf(dtype);
  const uint64_t mantissa = random() & fields.mantissa_mask();
  const uint64_t sign = random() % 2 == 0 ? fields.sign() : 0;
  const uint64_t octaves = (fields.one() >> fields.mantissa_bits) - 1;
  const uint64_t spread = (fields.one() - ((random() % octaves) << fields.mantissa_bits)) | mantissa;
  switch (pattern) {
    case Pattern::kSpread: return sign | spread;
    case Pattern::kZeros: return sign;
    case Pattern::kConstant: return sign | fields.one();
    case Pattern::kTies: return sign | (fields.one() + random() % 4);
    case Pattern::kDenormals: return sign | mantissa;
    case Pattern::kSparse: return random() % 100 == 0 ? sign | spread : sign;
    case Pattern::kAscending:
      return sign | static_cast<uint64_t>(static_cast<double>(i) / static_cast<double>(n) *
                                          static_cast<double>(fields.infinity()));
    case Pattern::kNan: return sign | fields.infinity() | std::max<uint64_t>(1, mantissa);
    case Pattern::kAnyBits: return random() & (fields.sign() | (fields.sign() - 1));
    case Pattern::kMixed: break;
  }
  const uint64_t kinds[] = {fields.infinity(), fields.infinity() | 1, 0, mantissa, spread, fields.infinity() - 1};
  return sign | kinds[random() % 6];
}

inline Values Draw(DType dtype, Pattern pattern, int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  Values values(dtype, n);
  for (int64_t i = 0; i < n; ++i) values.Set(i, DrawBits(dtype, pattern, i, n, random));
  return values;
}

}  // namespace hvd_sparse
