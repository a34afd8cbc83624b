// Candidates of a selection, gathered while the data are read once.
#pragma once

#include "../core/selection_key.h"
#include "select_state.h"
#include "warp.cuh"

namespace hvd_sparse {

// The bar may be above infinity, so that nothing reaches it; NaN never does.
template <typename T>
__device__ inline bool ReachesBar(T value, uint64_t bar) {
  const uint64_t magnitude = MagnitudeBits(value);
  constexpr uint64_t kInfinity = kInfinityBits<T>;
  return magnitude >= bar && magnitude <= kInfinity;
}

// Takes an element that reaches the bar, as long as there is room. All threads of a warp call it together.
template <typename T>
__device__ inline void Offer(T value, int64_t index, uint64_t bar, const Candidates& candidates) {
  const int64_t slot = TakeSlot(ReachesBar(value, bar), &candidates.state->gathered);
  if (slot < 0 || slot >= candidates.capacity) return;
  candidates.keys[slot] = SelectionKey(value);
  candidates.indices[slot] = index;
}

}  // namespace hvd_sparse
