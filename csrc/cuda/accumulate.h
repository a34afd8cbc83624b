// Adds gradients to the error feedback of one tensor or of many, on a device; see core/accumulate.h.
#pragma once

#include <vector>

#include "../core/accumulate.h"
#include "batch.h"
#include "select_state.h"

namespace hvd_sparse {

// The accumulation of one tensor.
struct AccumulateJob {
  Array gradient;
  AccumulateParams params;
  Feedback feedback;
  bool* finite;                // set to false if a gradient element is not finite, else not written
  bool active;                 // false: the error feedback does not change; requires factor 1 and no weight decay
  CandidateBuffer candidates;  // receives the elements that reach its bar; the state is null if none are gathered
  int64_t begin;               // offset of this tensor in the selection, in elements
};

// Returns a job that updates the error feedback and gathers no candidates.
inline AccumulateJob MakeAccumulateJob(const Array& gradient, const AccumulateParams& params, Feedback feedback,
                                       bool* finite) {
  AccumulateJob job{};
  job.gradient = gradient;
  job.params = params;
  job.feedback = feedback;
  job.finite = finite;
  job.active = true;
  return job;
}

// Tensors that one kernel can process.
struct AccumulateGroup {
  DType dtype;
  AccumulateRule rule;
  Batch<AccumulateJob> batch;
};

std::vector<AccumulateGroup> MakeGroups(const std::vector<AccumulateJob>& jobs, Tables* tables);

cudaError_t accumulate_launch(const AccumulateGroup& group, cudaStream_t stream);

// Updates the error feedback of several tensors. finite: for each, whether its gradient was finite.
int64_t accumulate_workspace_size(const std::vector<Part>& parts);
cudaError_t accumulate_launch(const std::vector<Part>& parts, bool* finite, void* workspace, cudaStream_t stream);

// Processes a single tensor.
cudaError_t accumulate_launch(const AccumulateJob& job, cudaStream_t stream);

}  // namespace hvd_sparse
