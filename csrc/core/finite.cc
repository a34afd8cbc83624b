#include "finite.h"

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "multiversion.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kFiniteChunk = 4096;

// Uses integers: compilers vectorise their maximum, but not always that of floating-point numbers.
template <typename T>
inline BitsOf<T> ResidualBits(T value) {
  return MagnitudeBits(value);
}
inline uint32_t ResidualBits(double value) { return MagnitudeBits(static_cast<float>(value)); }

template <typename T>
inline __attribute__((always_inline)) bool ReachesInfinity(const T* data, int64_t n) {
  using Residual = std::conditional_t<std::is_same_v<T, double>, float, T>;
  int any = 0;
  for (int64_t i = 0; i < n; ++i) any |= ResidualBits(data[i]) >= kInfinityBits<Residual>;
  return any != 0;
}

HVD_SPARSE_MULTIVERSION bool ReachesInfinityOf(const float* data, int64_t n) { return ReachesInfinity(data, n); }
HVD_SPARSE_MULTIVERSION bool ReachesInfinityOf(const double* data, int64_t n) { return ReachesInfinity(data, n); }
HVD_SPARSE_MULTIVERSION bool ReachesInfinityOf(const Float16* data, int64_t n) { return ReachesInfinity(data, n); }
HVD_SPARSE_MULTIVERSION bool ReachesInfinityOf(const BFloat16* data, int64_t n) { return ReachesInfinity(data, n); }

}  // namespace

bool AllFinite(const Array& values, const ParallelFor& parallel_for) {
  std::atomic<bool> finite{true};
  Dispatch(values, [&](const auto* data) {
    parallel_for(0, values.size, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end && finite.load(std::memory_order_relaxed); i += kFiniteChunk) {
        const int64_t size = std::min(kFiniteChunk, end - i);
        if (ReachesInfinityOf(data + i, size)) finite.store(false, std::memory_order_relaxed);
      }
    });
  });
  return finite.load();
}

}  // namespace hvd_sparse
