// Payloads written on a device: the same bytes as core/payload.h's Pack.
#pragma once

#include <vector>

#include "batch.h"
#include "plan.h"

namespace hvd_sparse {

struct PackState {
  uint32_t sum;  // what the bytes leave as a remainder
  bool refused;  // the indices do not ascend in [0, n)
};

// One payload: plan.size bytes, from a multiple of 8 on. `entries` is k or 0; values are float32, or float64 for that
// type, as quantize_low_bit_launch made them for low-bit types, and unread for none. Indices that do not ascend in [0,
// n) cannot be refused without waiting for the device: the checksum of their payload is wrong on purpose, so that every
// decoder refuses it.
struct PackJob {
  DevicePlan plan;
  const int64_t* indices;
  const void* values;
  int64_t entries;
  uint8_t* payload;
  PackState* state;
  uint32_t* slots;  // of low-bit values: the groups that hold entries, numbered; null if there is one
  uint32_t* least;  // and the smallest and largest magnitude of each
  uint32_t* largest;
};

// The pieces of a workspace, which the jobs are told of.
struct PackWork {
  PackWork(void* base, std::vector<PackJob>* jobs);

  std::vector<unsigned> blocks;  // of each job
  uint32_t* slots;
  int64_t slot_count = 0;
  uint32_t* least;  // with `largest` behind it
  int64_t level_count = 0;
  int64_t size;
};

cudaError_t pack_launch(const Batch<PackJob>& batch, const PackWork& work, cudaStream_t stream);

int64_t pack_workspace_size(const PayloadPlan& plan);

// One payload alone.
cudaError_t pack_launch(const PayloadPlan& plan, const int64_t* indices, const void* values, int64_t entries,
                        uint8_t* payload, void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
