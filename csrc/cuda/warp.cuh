// Cooperation of the threads of a warp, and of the blocks of a grid.
#pragma once

#include <cstdint>

namespace hvd_sparse {

using Count = unsigned long long;  // the 64-bit type of atomics

constexpr unsigned kWholeWarp = 0xffffffffu;

// Returns how many of `count` ascending numbers are below `value`, which is the same for groups of kLooks threads. Each
// group looks at kLooks numbers at a time, because each look waits for memory. All threads of the warp must call it.
template <int kLooks, typename T>
__device__ inline int64_t CountBelowTogether(const T* ascending, int64_t count, T value) {
  const auto look = static_cast<int>(threadIdx.x % kLooks);
  int64_t low = 0;
  int64_t high = count;
  while (__any_sync(kWholeWarp, low < high)) {
    const auto at = [&](int of_look) { return low + (high - low) * (of_look + 1) / (kLooks + 1); };
    const bool is_below = low < high && ascending[at(look)] < value;
    const unsigned all = __ballot_sync(kWholeWarp, is_below) >> (threadIdx.x % 32 / kLooks * kLooks);
    if (low >= high) continue;
    const int below = __popc(all & (kWholeWarp >> (32 - kLooks)));
    const int64_t end = below < kLooks ? at(below) : high;
    if (below > 0) low = at(below - 1) + 1;
    high = end;
  }
  return low;
}

// Returns the next free slot, counted by *counter, to each thread that wants one, and -1 to the others. All threads of
// the warp must call it. One thread increments the counter for all.
template <typename Counter>
__device__ inline int64_t TakeSlot(bool wanted, Counter* counter) {
  const unsigned ballot = __ballot_sync(kWholeWarp, wanted);
  if (ballot == 0) return -1;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int leader = __ffs(static_cast<int>(ballot)) - 1;
  Counter first = 0;
  if (lane == leader) first = atomicAdd(counter, static_cast<Counter>(__popc(ballot)));
  first = static_cast<Counter>(__shfl_sync(kWholeWarp, static_cast<Count>(first), leader));
  const unsigned before = ballot & ((1u << lane) - 1u);
  return wanted ? static_cast<int64_t>(first) + __popc(before) : -1;
}

// Items that the threads of a block append to a list in global memory. They are first collected in shared memory, so
// that a block, not each warp, increments the list's counter: thousands of increments of one address are slow.
template <typename Item, int kRoom>
struct Collected {
  Item items[kRoom];
  unsigned count;
  Count first;

  // All threads of the block must call it before Add.
  __device__ void Begin() {
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
  }

  // Calls write(slot, item) for an item that does not fit. All threads of the warp must call it.
  template <typename Write>
  __device__ void Add(bool wanted, const Item& item, Count* counter, const Write& write) {
    const int64_t place = TakeSlot(wanted, &count);
    if (place >= 0 && place < kRoom) items[place] = item;
    const bool is_left = place >= kRoom;
    if (!__any_sync(kWholeWarp, is_left)) return;
    const int64_t slot = TakeSlot(is_left, counter);
    if (is_left) write(slot, item);
  }

  // Calls write(slot, item) for the collected items. All threads of the block must call it.
  template <typename Write>
  __device__ void Flush(Count* counter, int threads, const Write& write) {
    __syncthreads();
    const unsigned size = count < kRoom ? count : kRoom;
    if (size == 0) return;
    if (threadIdx.x == 0) first = atomicAdd(counter, static_cast<Count>(size));
    __syncthreads();
    for (unsigned i = threadIdx.x; i < size; i += static_cast<unsigned>(threads)) {
      write(static_cast<int64_t>(first) + i, items[i]);
    }
  }
};

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
