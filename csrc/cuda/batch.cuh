// Finds the job of a batch that a block works on.
#pragma once

#include "batch.h"

namespace hvd_sparse {

// The share of a block: it is number `block` of the `blocks` that work on `job`.
template <typename Job>
struct Share {
  Job job;
  int64_t number;
  unsigned block;
  unsigned blocks;
};

template <typename Job>
__device__ Share<Job> ShareOf(const Batch<Job>& batch) {
  if (batch.many == nullptr) return {batch.one, 0, blockIdx.x, gridDim.x};
  int64_t low = 0;
  int64_t high = batch.count - 1;
  while (low < high) {  // find the last job that starts at or before this block
    const int64_t middle = low + (high - low + 1) / 2;
    if (batch.starts[middle] <= blockIdx.x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {batch.many[low], low, blockIdx.x - batch.starts[low], batch.starts[low + 1] - batch.starts[low]};
}

// Returns the job of this block in a grid with one block for each job.
template <typename Job>
__device__ Job JobOfBlock(const Batch<Job>& batch) {
  return batch.many == nullptr ? batch.one : batch.many[blockIdx.x];
}

}  // namespace hvd_sparse
