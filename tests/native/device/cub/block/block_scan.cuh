// Stands in for CUB's block scans, see cuda_runtime_api.h.
#pragma once

#include <cuda_runtime_api.h>

namespace cub {

template <typename T, int threads>
class BlockScan {
 public:
  struct TempStorage {};

  explicit BlockScan(TempStorage&) {}

  void InclusiveSum(T value, T& sum, T& all) {
    ExclusiveSum(value, sum, all);
    sum += value;
  }
  void ExclusiveSum(T value, T& before, T& all) {
    const uint64_t* values = hvd_sparse::MeetBlock(static_cast<uint64_t>(value));
    T sums[2] = {};
    for (unsigned thread = 0; thread < threads; ++thread) {
      if (thread < threadIdx.x) sums[0] += static_cast<T>(values[thread]);
      sums[1] += static_cast<T>(values[thread]);
    }
    before = sums[0];
    all = sums[1];
  }
  void ExclusiveSum(T value, T& before) {
    T all;
    ExclusiveSum(value, before, all);
  }
};

}  // namespace cub
