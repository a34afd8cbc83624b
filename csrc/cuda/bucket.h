// Buckets of selections on a device, from gradients to payloads and back; see core/bucket.h. What a framework's adapter
// calls, once a bucket: all pointers are of the device, the lists themselves of the host.
#pragma once

#include <vector>

#include "../core/bucket.h"
#include "../core/hint.h"
#include "../core/reduce.h"
#include "reduce.h"

namespace hvd_sparse {

// One selection of plan.k of plan.n elements, and the tensors that share it: these ascend and do not overlap, and what
// lies in none of them is zero.
struct BucketSelection {
  PayloadPlan plan;
  std::vector<Part> parts;
  SelectParams select;  // plan.k is its k
  Hint* hint;           // taken in place of select.threshold_hint, and updated; may be null
  uint8_t* payload;     // from a multiple of 8 on
};
using BucketSelections = std::vector<BucketSelection>;

cudaError_t accumulate_bucket_workspace_size(const BucketSelections& selections, int64_t* size);

// Updates the memory of the parts, unless not active, selects in it, and packs. info, two a selection: the smallest
// selected magnitude; how many elements reached the hint, k if there was none. finite, one a part: of each gradient.
cudaError_t accumulate_bucket_launch(const BucketSelections& selections, bool active, Centre centre, double* info,
                                     bool* finite, void* workspace, cudaStream_t stream);

// A payload of the rank's own, and the memory that what it says is to leave.
struct SentSelection {
  PayloadPlan plan;
  const uint8_t* payload;
  std::vector<MemorySlice> slices;
};
using SentSelections = std::vector<SentSelection>;

int64_t clear_bucket_workspace_size(const SentSelections& selections);

// A payload that fails a check changes nothing.
cudaError_t clear_bucket_launch(const SentSelections& selections, DecodeStatus* status, void* workspace,
                                cudaStream_t stream);

// The first rank's payload, and where the sum goes; the slices ascend and do not overlap.
struct SummedSelection {
  PayloadPlan plan;
  const uint8_t* first;
  std::vector<Slice> slices;
};
using SummedSelections = std::vector<SummedSelection>;

int64_t reduce_bucket_workspace_size(const SummedSelections& selections, int64_t ranks);

// Payload r of a selection lies r * stride bytes behind its first. Of a selection with a payload that fails a check all
// slices become NaN.
cudaError_t reduce_bucket_launch(const SummedSelections& selections, int64_t ranks, int64_t stride, float scale,
                                 DecodeStatus* status, void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
