// Reads the entries of payloads after their positions have been decoded.
#pragma once

#include "../core/entries.h"
#include "batch.cuh"
#include "decode.h"
#include "groups.cuh"

namespace hvd_sparse {

constexpr int kAddThreads = 256;
constexpr int kRanksAtOnce = kAddThreads / 2;
constexpr int kAhead = 4;  // entries that a thread reads ahead

// Returns the low-bit value of an element. Any bytes are valid.
__device__ inline float LowBitAt(const DecodeJob& job, int64_t row, const uint8_t* payload, int64_t j, int64_t index) {
  const DevicePlan& plan = job.plan;
  const uint32_t* slots = job.rows.slots == nullptr ? nullptr : job.rows.slots + row * (plan.groups + 1);
  const int64_t slot = SlotOf(plan, slots, index);
  const int64_t bit = plan.code_bits * j;
  const auto code = static_cast<uint32_t>(ReadBytes(payload, plan.size, plan.codes_at + bit / 8, 1) >> (bit % 8));
  const int64_t which = plan.code_bits == 2 ? (code >> 1) & 1u : 0;
  const int64_t at = plan.values_at + 4 * (plan.code_bits * slot + which);
  const auto bits = static_cast<uint32_t>(ReadBytes(payload, plan.size, at, 4));
  return BitsToFloat((bits & 0x7fffffffu) | (code & 1u) << 31);
}

// Returns the value of entry j of a row. `index`, in [0, n), is the element of this entry.
__device__ inline float FloatAt(const DecodeJob& job, int64_t row, const uint8_t* payload, int64_t j, int64_t index) {
  const DevicePlan& plan = job.plan;
  const auto read = [&](int size) { return ReadBytes(payload, plan.size, plan.values_at + size * j, size); };
  switch (plan.dtype) {
    case DType::kFloat64: return static_cast<float>(__longlong_as_double(static_cast<long long>(read(8))));
    case DType::kFloat16: return ToFloat(Float16{static_cast<uint16_t>(read(2))});
    case DType::kBFloat16: return ToFloat(BFloat16{static_cast<uint16_t>(read(2))});
    case DType::kInt2:
    case DType::kInt1: return LowBitAt(job, row, payload, j, index);
    case DType::kNone: return 0.0f;
    default: break;
  }
  return BitsToFloat(static_cast<uint32_t>(read(4)));
}

__device__ inline int64_t IndexAt(const DecodeJob& job, int64_t row, int64_t j) {
  return job.rows.indices == nullptr ? j : job.rows.indices[row * job.plan.k + j];
}

// Returns the number of entries of a payload below an element, at most n.
__device__ inline int64_t EntriesBelow(const DecodeJob& job, int64_t row, int64_t element) {
  const int64_t entries = job.rows.entries[row];
  if (job.rows.indices == nullptr) return element < entries ? element : entries;
  const int64_t* indices = job.rows.indices + row * job.plan.k;
  if (job.plan.coding != Coding::kRunLength || element >= job.plan.n) return CountBelow(indices, entries, element);
  const int64_t* starts = job.rows.starts + row * (job.rows.tiles + 1) + element / kBlock;
  if (element % kBlock == 0) return starts[0];
  return starts[0] + CountBelow(indices + starts[0], starts[1] - starts[0], element);
}

struct Entry {
  int64_t index;
  float value;
};

__device__ inline Entry EntryAt(const DecodeJob& job, int64_t first, int64_t row, int64_t j) {
  const int64_t index = IndexAt(job, row, j);
  return {index, FloatAt(job, row, job.data + (first + row) * job.stride, j, index)};
}

// The entries of some elements in a group of payloads: entries [begin, end) of each.
struct Bounds {
  int64_t of[kRanksAtOnce][2];

  // Sets the bounds of payloads [group, count) by bound_of(row, is_end). All threads of a block must call it.
  template <typename BoundOf>
  __device__ void Find(int64_t group, int64_t count, const BoundOf& bound_of) {
    const int64_t row = group + threadIdx.x / 2;
    const bool is_end = threadIdx.x % 2 != 0;
    if (row < count) of[threadIdx.x / 2][is_end ? 1 : 0] = bound_of(row, is_end);
    __syncthreads();
  }
};

// Calls add(entry) in rank order, with entries that are read ahead: without this, each rank waits for memory.
template <typename BeginRank, typename Add>
__device__ void AddAhead(const DecodeJob& job, int64_t first, int64_t group, int64_t ranks, const Bounds& bounds,
                         const BeginRank& begin_rank, const Add& add) {
  Entry entries[kAhead] = {};
  int64_t rank_of[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    int64_t left = a * kAddThreads + threadIdx.x;
    rank_of[a] = -1;
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t size = bounds.of[r][1] - bounds.of[r][0];
      if (left < size) {
        rank_of[a] = r;
        entries[a] = EntryAt(job, first, group + r, bounds.of[r][0] + left);
        break;
      }
      left -= size;
    }
  }
  for (int64_t r = 0; r < ranks; ++r) {
    begin_rank();
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (rank_of[a] == r) add(entries[a]);
    }
    __syncthreads();
  }
}

// Calls begin_rank() and add(entry) for the entries of some elements, in the order of ranks. Those of a row are entries
// [bound_of(row, false), bound_of(row, true)). Each rank has at most one entry for an element, and the barrier between
// ranks keeps the order. Each thread of a block must call it; entries of one rank ascend in a thread.
template <typename BoundOf, typename BeginRank, typename Add>
__device__ void ForEntries(const DecodeJob& job, int64_t first, int64_t count, const BoundOf& bound_of,
                           const BeginRank& begin_rank, const Add& add) {
  __shared__ Bounds bounds;
  for (int64_t group = 0; group < count; group += kRanksAtOnce) {
    bounds.Find(group, count, bound_of);
    const int64_t ranks = count - group < kRanksAtOnce ? count - group : kRanksAtOnce;
    int64_t entries = 0;
    for (int64_t r = 0; r < ranks; ++r) entries += bounds.of[r][1] - bounds.of[r][0];
    if (entries <= kAhead * kAddThreads) {
      AddAhead(job, first, group, ranks, bounds, begin_rank, add);
      continue;
    }
    for (int64_t r = 0; r < ranks; ++r) {
      begin_rank();
      for (int64_t j = bounds.of[r][0] + threadIdx.x; j < bounds.of[r][1]; j += kAddThreads) {
        add(EntryAt(job, first, group + r, j));
      }
      __syncthreads();
    }
  }
}

}  // namespace hvd_sparse
