// Quantizes values to 2 bits or 1 on a device, with the same results as QuantizeLowBit in core/low_bit.h.
//
// Entries are sorted by group. A thread adds the magnitudes of a chunk of a group in order, then another thread adds
// the group's chunks in order, as the host does; see core/low_bit_level.h.
#pragma once

#include <vector>

#include "../core/low_bit_level.h"
#include "batch.h"
#include "plan.h"

namespace hvd_sparse {

// k values of elements at ascending indices, quantized in place.
struct LowBitJob {
  DevicePlan plan;  // only n, k and the groups are used
  Level level;
  const int64_t* indices;  // not read if there is one group
  float* values;
  uint64_t tag;            // number of this job, in the bits above group and entry
  uint64_t* keys;          // [k]: tag, group and entry
  const uint64_t* sorted;  // [k]: the keys, ascending
  uint32_t* slots;         // of the groups, see groups.cuh; null if there is one group
  int64_t* starts;         // [slots]: the first sorted entry of each group
  MagnitudeClass* chunks;  // [2 * number of chunks]: for each chunk the classes of small and large magnitudes
  double* splits;          // [slots]: the mean that divides small from large magnitudes
  float* levels;           // [slots, 2]
  int bits;                // width of an entry's number in a key
};

// The arrays of a workspace.
struct LowBitWork {
  LowBitWork(void* base, std::vector<LowBitJob>* jobs);

  std::vector<unsigned> blocks;  // for each job
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

// Quantizes a single payload's values.
cudaError_t quantize_low_bit_workspace_size(const PayloadPlan& plan, int64_t* size);
cudaError_t quantize_low_bit_launch(const PayloadPlan& plan, Level level, const int64_t* indices, float* values,
                                    void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
