// Element types and their magnitudes as integers.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace hvd_sparse {

constexpr double kSmallestFloat = 0x1p-149;         // the smallest float32 above 0
constexpr int64_t kMaxElements = int64_t{1} << 48;  // of a tensor, or of all in a call: no size in bytes can overflow

// The payload header contains these numbers: never change one. kNone has no size: the payload contains indices only.
enum class DType : uint8_t { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3, kNone = 4, kInt2 = 5, kInt1 = 6 };

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

HVD_SPARSE_HD inline float BitsToFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

HVD_SPARSE_HD inline uint32_t FloatToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

HVD_SPARSE_HD inline float ToFloat(BFloat16 value) { return BitsToFloat(static_cast<uint32_t>(value.bits) << 16); }

HVD_SPARSE_HD inline float ToFloat(Float16 value) {
  // No branches, so that it vectorises. No denormal operands, because the host may flush them to zero.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t normal = magnitude + (magnitude >= 0x0f800000u ? 0x70000000u : 0x38000000u);
  const uint32_t denormal = FloatToBits(BitsToFloat(magnitude + 0x38800000u) - BitsToFloat(0x38800000u));
  return BitsToFloat(sign | (magnitude >= 0x00800000u ? normal : denormal));
}

HVD_SPARSE_HD inline float ToFloat(float value) { return value; }
HVD_SPARSE_HD inline float ToFloat(double value) { return static_cast<float>(value); }

// Magnitudes are compared as integers with the same bits. The order is the same, exact for every type, and faster to
// compute for 16-bit types. It does not change if the host flushes denormals to zero. NaN is above infinity.
HVD_SPARSE_HD inline uint32_t MagnitudeBits(float value) { return FloatToBits(value) & 0x7fffffffu; }
HVD_SPARSE_HD inline uint16_t MagnitudeBits(Float16 value) { return value.bits & 0x7fffu; }
HVD_SPARSE_HD inline uint16_t MagnitudeBits(BFloat16 value) { return value.bits & 0x7fffu; }
HVD_SPARSE_HD inline uint64_t MagnitudeBits(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffffffffffffull;
}

template <typename T>
using BitsOf = decltype(MagnitudeBits(T{}));

// Denormals are converted as integers, because the host may flush them to zero.
HVD_SPARSE_HD inline double MagnitudeFromBits(float, uint32_t bits) {
  return bits < 0x00800000u ? static_cast<double>(bits) * 0x1p-149 : static_cast<double>(BitsToFloat(bits));
}
HVD_SPARSE_HD inline double MagnitudeFromBits(Float16, uint16_t bits) { return ToFloat(Float16{bits}); }
HVD_SPARSE_HD inline double MagnitudeFromBits(BFloat16, uint16_t bits) {
  return MagnitudeFromBits(float{}, static_cast<uint32_t>(bits) << 16);
}
HVD_SPARSE_HD inline double MagnitudeFromBits(double, uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
constexpr BitsOf<T> kInfinityBits = 0;
template <>
inline constexpr uint32_t kInfinityBits<float> = 0x7f800000u;
template <>
inline constexpr uint64_t kInfinityBits<double> = 0x7ff0000000000000ull;
template <>
inline constexpr uint16_t kInfinityBits<Float16> = 0x7c00u;
template <>
inline constexpr uint16_t kInfinityBits<BFloat16> = 0x7f80u;

// Returns the bits of the smallest magnitude of type T that is at least `threshold` (>= 0, not NaN).
template <typename T>
HVD_SPARSE_HD BitsOf<T> SmallestReaching(double threshold) {
  BitsOf<T> low = 0;
  BitsOf<T> high = kInfinityBits<T>;
  while (low < high) {
    const BitsOf<T> middle = static_cast<BitsOf<T>>(low + (high - low) / 2);
    if (MagnitudeFromBits(T{}, middle) >= threshold) {
      high = middle;
    } else {
      low = static_cast<BitsOf<T>>(middle + 1);
    }
  }
  return low;
}

// Returns the bytes per element; 0 for kNone, and for the low-bit types, whose size LowBitSize returns.
HVD_SPARSE_HD inline int64_t ItemSize(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat64: return 8;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kNone:
    case DType::kInt2:
    case DType::kInt1: break;
  }
  return 0;
}

// A read-only one-dimensional array of any element type.
struct Array {
  const void* data;
  int64_t size;
  DType dtype;
};

// Calls function(const T* data) with the array's element type.
template <typename Function>
auto Dispatch(const Array& array, Function&& function) {
  switch (array.dtype) {
    case DType::kFloat64: return function(static_cast<const double*>(array.data));
    case DType::kFloat16: return function(static_cast<const Float16*>(array.data));
    case DType::kBFloat16: return function(static_cast<const BFloat16*>(array.data));
    default: break;
  }
  return function(static_cast<const float*>(array.data));
}

}  // namespace hvd_sparse
