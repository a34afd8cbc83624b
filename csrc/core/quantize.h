// Values of 16 bits on the wire: float16 and bfloat16, rounded to nearest even.
#pragma once

#include "dtype.h"

namespace hvd_sparse {

// Shifts out `drop` low bits, rounding to nearest, ties to even.
HVD_SPARSE_HD inline uint32_t RoundShift(uint32_t bits, int drop) {
  const uint32_t half = (1u << (drop - 1)) - 1u;
  return (bits + half + ((bits >> drop) & 1u)) >> drop;
}

HVD_SPARSE_HD inline uint32_t AtMost(uint32_t bits, uint32_t bound) { return bits < bound ? bits : bound; }

// A finite value too large for the type becomes the largest finite one. The difference stays in the residual, which an
// infinity would destroy. Infinities and NaN do not change.
HVD_SPARSE_HD inline Float16 ToFloat16(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude == 0x7f800000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: round to a multiple of 2^-24
    const int exponent = static_cast<int>(magnitude >> 23);
    const uint32_t mantissa = (magnitude & 0x7fffffu) | (exponent > 0 ? 0x800000u : 0u);
    const int drop = 126 - (exponent > 1 ? exponent : 1);
    half = drop > 24 ? 0u : RoundShift(mantissa, drop);
  } else {
    half = AtMost(RoundShift(magnitude - 0x38000000u, 13), 0x7bffu);
  }
  return {static_cast<uint16_t>(sign | half)};
}

HVD_SPARSE_HD inline BFloat16 ToBFloat16(float value) {
  const uint32_t bits = FloatToBits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7fc0u)};
  if (magnitude == 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7f80u)};
  return {static_cast<uint16_t>(sign | AtMost(RoundShift(magnitude, 16), 0x7f7fu))};
}

// Returns the value that the receiver will decode.
HVD_SPARSE_HD inline float QuantizeOne(float value, DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return ToFloat(ToFloat16(value));
    case DType::kBFloat16: return ToFloat(ToBFloat16(value));
    case DType::kNone: return 0;
    default: break;
  }
  return value;
}

// Sets result[n] to the float32 values that the receiver will decode. `dtype` is not a low-bit type (see low_bit.h).
// `result` may be `values`.
void Quantize(const float* values, int64_t n, DType dtype, float* result);

}  // namespace hvd_sparse
