// Payloads written on a device: the same bytes as core/payload.h's Pack.
#pragma once

#include "batch.h"
#include "plan.h"

namespace hvd_sparse {

struct PackState {
  uint32_t sum;  // what the bytes leave as a remainder
  bool refused;  // the indices do not ascend in [0, n)
};

// One payload: plan.size bytes, from a multiple of 8 on. `entries` is k or 0; values are float32, or float64 for that
// type, and unread for none. Indices that do not ascend in [0, n) cannot be refused without waiting for the device: the
// checksum of their payload is wrong on purpose, so that every decoder refuses it.
struct PackJob {
  PayloadPlan plan;
  const int64_t* indices;
  const void* values;
  int64_t entries;
  uint8_t* payload;
  PackState* state;
};

inline unsigned BlocksOf(const PackJob& job) { return BlocksFor(job.plan.size, 8 * kThreads); }

cudaError_t pack_launch(const Batch<PackJob>& batch, cudaStream_t stream);

int64_t pack_workspace_size();

// One payload alone.
cudaError_t pack_launch(const PayloadPlan& plan, const int64_t* indices, const void* values, int64_t entries,
                        uint8_t* payload, void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
