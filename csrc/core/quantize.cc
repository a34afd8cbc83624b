#include "quantize.h"

#include <algorithm>

namespace hvd_sparse {
namespace {

// Shifts out `drop` low bits, rounding to nearest, ties to even.
inline uint32_t RoundShift(uint32_t bits, int drop) {
  const uint32_t half = (1u << (drop - 1)) - 1u;
  return (bits + half + ((bits >> drop) & 1u)) >> drop;
}

}  // namespace

Float16 ToFloat16(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude == 0x7f800000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // under 2^-14: a multiple of 2^-24
    const int exponent = static_cast<int>(magnitude >> 23);
    const uint32_t mantissa = (magnitude & 0x7fffffu) | (exponent > 0 ? 0x800000u : 0u);
    const int drop = 126 - std::max(exponent, 1);
    half = drop > 24 ? 0u : RoundShift(mantissa, drop);
  } else {
    half = std::min(RoundShift(magnitude - 0x38000000u, 13), 0x7bffu);
  }
  return {static_cast<uint16_t>(sign | half)};
}

BFloat16 ToBFloat16(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7fc0u)};
  if (magnitude == 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7f80u)};
  return {static_cast<uint16_t>(sign | std::min(RoundShift(magnitude, 16), 0x7f7fu))};
}

void Quantize(const float* values, int64_t n, DType dtype, float* result) {
  for (int64_t i = 0; i < n; ++i) {
    switch (dtype) {
      case DType::kFloat16: result[i] = ToFloat(ToFloat16(values[i])); break;
      case DType::kBFloat16: result[i] = ToFloat(ToBFloat16(values[i])); break;
      case DType::kNone: result[i] = 0; break;
      default: result[i] = values[i]; break;
    }
  }
}

}  // namespace hvd_sparse
