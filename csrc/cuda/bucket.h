// A bucket of selections on a device, from gradients to payloads; see core/bucket.h. What a framework's adapter calls
// once a bucket: all pointers are of the device, the lists themselves of the host. The way back is in reduce.h.
#pragma once

#include <vector>

#include "../core/bucket.h"
#include "../core/hint.h"
#include "plan.h"

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
cudaError_t accumulate_bucket_launch(const BucketSelections& selections, bool active, Level level, double* info,
                                     bool* finite, void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
