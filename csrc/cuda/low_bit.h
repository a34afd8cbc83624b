// What survives the wire in 2 bits or 1, on a device: the same bits as core/low_bit.h's QuantizeLowBit.
//
// Sums are taken in the order of entries, as everywhere: a warp sums those of one group, one after the other, once they
// have been sorted by their groups.
#pragma once

#include <vector>

#include "batch.h"
#include "plan.h"

namespace hvd_sparse {

// k values of elements at ascending indices, changed in place.
struct LowBitJob {
  DevicePlan plan;  // n, k and the groups of it
  Level level;
  const int64_t* indices;  // unread if there is one group
  float* values;
  uint64_t tag;            // of this job, above the bits of its groups and entries
  uint64_t* keys;          // [k]: group and entry
  const uint64_t* sorted;  // the same, ascending
  uint32_t* slots;         // of its groups; null if there is one
  int64_t* starts;         // of each group that holds entries, where these begin among the sorted
  double* splits;          // [slots]: what tells small from large
  float* levels;           // [slots, 2]
  int bits;                // of an entry's number
};

// The pieces of a workspace.
struct LowBitWork {
  LowBitWork(void* base, std::vector<LowBitJob>* jobs);

  std::vector<unsigned> blocks;  // of each job
  uint32_t* slots;
  int64_t slot_count = 0;
  uint64_t* keys;
  uint64_t* sorted;
  int64_t total = 0;
  int sort_bits;
  void* sort;
  size_t sort_size = 0;
  cudaError_t status;
  int64_t size;
};

cudaError_t quantize_low_bit_launch(const Batch<LowBitJob>& batch, const LowBitWork& work, cudaStream_t stream);

// One job alone; of it plan, level and indices are read.
cudaError_t quantize_low_bit_workspace_size(const PayloadPlan& plan, int64_t* size);
cudaError_t quantize_low_bit_launch(const PayloadPlan& plan, Level level, const int64_t* indices, float* values,
                                    void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
