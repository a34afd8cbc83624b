// Numbers the groups of low-bit values that contain entries, in ascending order. This number (the slot) is the place of
// the group's levels in the payload.
#pragma once

#include <cub/block/block_scan.cuh>

#include "batch.cuh"
#include "plan.h"

namespace hvd_sparse {

constexpr int kGroupThreads = 1024;

// The entries of a payload, and the slots of the groups.
struct GroupRow {
  const int64_t* indices;  // null: entry j is element j
  int64_t entries;
  uint32_t* slots;  // [groups + 1], initially zero; the last is the number of slots. Null: there is one group
};

__device__ inline int64_t GroupOf(const DevicePlan& plan, int64_t index) {
  if (plan.segments == nullptr) return 0;
  if (index < 0) index = 0;  // an invalid index must not become an address
  const int64_t last = LastFrom(plan.segment_count, index, [&](int64_t i) { return plan.segments[i].begin; });
  const Channels segment = plan.segments[last];
  return segment.first + (index - segment.begin) % segment.channels;
}

__device__ inline int64_t SlotOf(const DevicePlan& plan, const uint32_t* slots, int64_t index) {
  return slots == nullptr ? 0 : slots[GroupOf(plan, index)];
}

// Marks the groups that contain entries. A payload that failed its checks may have indices outside the tensor; these
// are skipped.
template <typename Job>
__global__ void __launch_bounds__(kThreads) mark_groups_kernel(Batch<Job> batch) {
  const Share<Job> share = ShareOf(batch);
  const GroupRow row = GroupRowOf(share.job, blockIdx.y);
  if (row.slots == nullptr) return;
  for (int64_t j = int64_t{share.block} * kThreads + threadIdx.x; j < row.entries;
       j += int64_t{share.blocks} * kThreads) {
    const int64_t index = row.indices == nullptr ? j : row.indices[j];
    if (index >= 0 && index < share.job.plan.n) row.slots[GroupOf(share.job.plan, index)] = 1;
  }
}

template <typename Job>
__global__ void __launch_bounds__(kGroupThreads) number_groups_kernel(Batch<Job> batch) {
  using Scan = cub::BlockScan<uint32_t, kGroupThreads>;
  __shared__ typename Scan::TempStorage storage;
  const Job job = JobOfBlock(batch);
  const GroupRow row = GroupRowOf(job, blockIdx.y);
  if (row.slots == nullptr) return;
  uint32_t total = 0;
  for (int64_t base = 0; base < job.plan.groups; base += kGroupThreads) {
    const int64_t group = base + threadIdx.x;
    const uint32_t marked = group < job.plan.groups ? row.slots[group] : 0;
    uint32_t before = 0;
    uint32_t all = 0;
    Scan(storage).ExclusiveSum(marked, before, all);
    if (group < job.plan.groups) row.slots[group] = total + before;
    total += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) row.slots[job.plan.groups] = total;
}

// Returns the number of slot entries for a job.
inline int64_t SlotsFor(const DevicePlan& plan) { return plan.code_bits > 0 && plan.groups > 1 ? plan.groups + 1 : 0; }

// Numbers the groups of all jobs and rows. slots: their slot entries, which are contiguous.
template <typename Job>
cudaError_t NumberGroups(const Batch<Job>& batch, int64_t rows, uint32_t* slots, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const auto height = static_cast<unsigned>(rows);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(slots, 0, static_cast<size_t>(count) * sizeof(uint32_t), stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(mark_groups_kernel<Job>, dim3(batch.blocks, height), kThreads, stream, batch));
  return Launch(number_groups_kernel<Job>, dim3(static_cast<unsigned>(batch.count), height), kGroupThreads, stream,
                batch);
}

}  // namespace hvd_sparse
