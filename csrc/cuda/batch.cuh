// Finds the job of a batch that a block works on.
#pragma once

#include "batch.h"
#include "warp.cuh"

namespace hvd_sparse {

// The share of a block: it is number `block` of the `blocks` that work on `job`.
template <typename Job>
struct Share {
  Job job;
  int64_t number;
  unsigned block;
  unsigned blocks;
};

// Returns the last of `count` items that begins at or before a place. begin_of(i) ascends; the first item begins there.
template <typename BeginOf>
__device__ int64_t LastFrom(int64_t count, int64_t place, const BeginOf& begin_of) {
  int64_t low = 0;
  int64_t high = count - 1;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (begin_of(middle) <= place) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// All threads of the block must call it; there must be whole warps of them.
template <typename Job>
__device__ Share<Job> ShareOf(const Batch<Job>& batch) {
  if (batch.many == nullptr) return {batch.one, 0, blockIdx.x, gridDim.x};
  const int64_t job = CountBelowTogether<32>(batch.starts, batch.count, blockIdx.x + 1) - 1;
  return {batch.many[job], job, blockIdx.x - batch.starts[job], batch.starts[job + 1] - batch.starts[job]};
}

// Returns the job of this block in a grid with one block for each job.
template <typename Job>
__device__ Job JobOfBlock(const Batch<Job>& batch) {
  return batch.many == nullptr ? batch.one : batch.many[blockIdx.x];
}

}  // namespace hvd_sparse
