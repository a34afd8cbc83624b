// Cooperation of the threads of a warp, and of the blocks of a grid.
#pragma once

#include <cstdint>

namespace hvd_sparse {

using Count = unsigned long long;  // the 64-bit type of atomics

constexpr unsigned kWholeWarp = 0xffffffffu;

// Returns the next free slot, counted by *counter, to each thread that wants one, and -1 to the others. All threads of
// the warp must call it. One thread increments the counter for all.
__device__ inline int64_t TakeSlot(bool wanted, Count* counter) {
  const unsigned ballot = __ballot_sync(kWholeWarp, wanted);
  if (ballot == 0) return -1;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int leader = __ffs(static_cast<int>(ballot)) - 1;
  Count first = 0;
  if (lane == leader) first = atomicAdd(counter, static_cast<Count>(__popc(ballot)));
  first = __shfl_sync(kWholeWarp, first, leader);
  const unsigned before = ballot & ((1u << lane) - 1u);
  return wanted ? static_cast<int64_t>(first) + __popc(before) : -1;
}

// Returns whether this block is the last of `blocks` to call this function. The last block sees the writes of all
// others. All threads of a block must call it.
__device__ inline bool IsLastBlock(unsigned* ticket, unsigned blocks) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(ticket, 1u) == blocks - 1;
  __syncthreads();
  __threadfence();
  return is_last;
}

}  // namespace hvd_sparse
