// Arrays that simulate device memory, each with its exact size, and values of every awkward kind.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "../../../csrc/core/quantize.h"
#include "../expect.h"

namespace hvd_sparse {

// Uninitialised bytes, as from a framework's allocator.
class Scratch {
 public:
  explicit Scratch(int64_t size) : bytes_(new(std::align_val_t{256}) uint8_t[static_cast<size_t>(size) + 1]) {
    std::fill_n(bytes_.get(), size, uint8_t{0xa5});
  }
  void* data() { return bytes_.get(); }

 private:
  struct Free {
    void operator()(uint8_t* bytes) const { operator delete[](bytes, std::align_val_t{256}); }
  };
  std::unique_ptr<uint8_t[], Free> bytes_;
};

template <typename T>
T Narrow(double value) {
  if constexpr (std::is_same_v<T, Float16>) {
    return ToFloat16(static_cast<float>(value));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return ToBFloat16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <typename T>
constexpr DType kDTypeOf = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<double> = DType::kFloat64;
template <>
inline constexpr DType kDTypeOf<Float16> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;

enum class Kind { kNormal, kTies, kZeros, kConstant, kNan, kInfinite, kDenormal, kSparse };
constexpr Kind kKinds[] = {Kind::kNormal, Kind::kTies,     Kind::kZeros,    Kind::kConstant,
                           Kind::kNan,    Kind::kInfinite, Kind::kDenormal, Kind::kSparse};

inline double Draw(Kind kind, std::mt19937_64& random) {
  const auto pick = static_cast<int>(random() % 1000);
  const double normal = std::normal_distribution<double>()(random);
  switch (kind) {
    case Kind::kNormal: break;
    case Kind::kTies: return pick % 7 - 3;
    case Kind::kZeros: return pick % 2 == 0 ? 0.0 : -0.0;
    case Kind::kConstant: return -0.25;
    case Kind::kNan: return pick < 300 ? NAN : pick < 700 ? 0.0 : normal;
    case Kind::kInfinite: return pick < 10 ? INFINITY : pick < 20 ? -INFINITY : normal;
    case Kind::kDenormal: return (pick % 19 - 9) * 0x1p-149;
    case Kind::kSparse: return pick == 0 ? normal : 0.0;
  }
  return normal;
}

template <typename T>
std::vector<T> DrawValues(Kind kind, int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<T> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(Narrow<T>(Draw(kind, random)));
  return values;
}

// NaN is NaN, whatever its bits.
inline bool SameFloats(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (FloatToBits(a[i]) != FloatToBits(b[i]) && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

}  // namespace hvd_sparse
