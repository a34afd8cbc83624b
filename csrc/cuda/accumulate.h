// What a gradient does to the memory of one tensor, or of many, on a device; see core/accumulate.h.
#pragma once

#include <vector>

#include "../core/accumulate.h"
#include "batch.h"
#include "select_state.h"

namespace hvd_sparse {

// One tensor.
struct AccumulateJob {
  Array gradient;
  AccumulateParams params;
  Memory memory;
  bool* finite;           // set to false if the gradient is not finite everywhere, and else left
  bool active;            // otherwise the memory stays: factor must be 1, and nothing may decay
  Candidates candidates;  // takes what reaches its bar; its state is null if there are none
  int64_t begin;          // of the selection's elements that come before this tensor's
};

// Tensors that one kernel serves.
struct AccumulateGroup {
  DType dtype;
  AccumulateRule rule;
  bool is_wide;  // packs of elements may be read
  Batch<AccumulateJob> batch;
};

std::vector<AccumulateGroup> MakeGroups(const std::vector<AccumulateJob>& jobs, Tables* tables);

cudaError_t accumulate_launch(const AccumulateGroup& group, cudaStream_t stream);

// One tensor alone.
cudaError_t accumulate_launch(const AccumulateJob& job, cudaStream_t stream);

}  // namespace hvd_sparse
