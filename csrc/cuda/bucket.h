// Compresses a bucket of gradients into payloads on a device; see core/bucket.h. A framework adapter calls it once for
// each bucket. All pointers are device pointers; the lists are on the host. reduce.h decodes the payloads.
#pragma once

#include <vector>

#include "../core/bucket.h"
#include "../core/hint.h"
#include "plan.h"

namespace hvd_sparse {

// One selection of plan.k of plan.n elements. Its tensors (parts) must ascend and not overlap; elements outside all
// parts count as zero.
struct BucketSelection {
  PayloadPlan plan;
  std::vector<Part> parts;
  SelectParams select;  // its k is ignored: plan.k is used
  Hint* hint;           // replaces select.threshold_hint and is updated; may be null
  uint8_t* payload;     // address is a multiple of 8
};
using BucketSelections = std::vector<BucketSelection>;

cudaError_t accumulate_bucket_workspace_size(const BucketSelections& selections, int64_t* size);

// Updates the error feedback of the parts if `active`, selects from the residuals, and packs the payloads. info: for
// each selection the smallest selected magnitude, and the number of elements that reached the hint (k if there was no
// hint). finite: for each part, whether its gradient was finite.
cudaError_t accumulate_bucket_launch(const BucketSelections& selections, bool active, Level level, double* info,
                                     bool* finite, void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
