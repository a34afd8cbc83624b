// Writes payloads on a device, with the same bytes as Pack in core/payload.h.
#pragma once

#include <vector>

#include "batch.h"
#include "plan.h"

namespace hvd_sparse {

struct PackState {
  uint32_t sum;  // remainder of the payload's bytes, for the checksum
  bool refused;  // the indices do not ascend in [0, n)
};

// One payload of plan.size bytes, whose address is a multiple of 8. `entries` is k or 0. `values` are float64 for this
// wire type, else float32; for low-bit types they must be a result of quantize_low_bit_launch; for kNone they are not
// read. An error for indices that do not ascend in [0, n) would have to wait for the device. Instead, the payload gets
// a wrong checksum, so that every decoder refuses it.
struct PackJob {
  DevicePlan plan;
  const int64_t* indices;
  const void* values;
  int64_t entries;
  uint8_t* payload;
  PackState* state;
  uint32_t* slots;  // for low-bit values, see groups.cuh; null if there is one group
  uint32_t* least;  // the smallest and largest magnitude of each slot
  uint32_t* largest;
};

// The arrays of a workspace. The constructor sets the jobs' pointers to them.
struct PackWork {
  PackWork(void* base, std::vector<PackJob>* jobs);

  std::vector<unsigned> blocks;  // for each job
  uint32_t* slots;
  int64_t slot_count = 0;
  uint32_t* least;  // followed by `largest`
  int64_t level_count = 0;
  int64_t size;
};

cudaError_t pack_launch(const Batch<PackJob>& batch, const PackWork& work, cudaStream_t stream);

int64_t pack_workspace_size(const PayloadPlan& plan);

// Writes a single payload.
cudaError_t pack_launch(const PayloadPlan& plan, const int64_t* indices, const void* values, int64_t entries,
                        uint8_t* payload, void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
