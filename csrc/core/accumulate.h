// What a gradient does to the memory of a tensor, or of several. The buffers belong to the caller, and so does the
// choice of rule.
#pragma once

#include <vector>

#include "dtype.h"
#include "parallel.h"
#include "select.h"
#include "status.h"
#include "update.h"

namespace hvd_sparse {

// g is the gradient as float32, with elements that are not finite taken as zero, times factor, plus weight_decay *
// parameter; where that overflows, or the parameter is not finite, g is zero, and the gradient counts as not finite:
// no such thing enters a memory. Where the update of an element overflows, its residual and velocity stay as they are,
// and the gradient counts as not finite, too. Each product and each sum is rounded; nothing depends on the hardware.
struct AccumulateParams {
  AccumulateRule rule = AccumulateRule::kResidual;
  float factor = 1;
  float momentum = 0;
  float weight_decay = 0;
  const float* parameter = nullptr;  // of the gradient's size; may be null where weight_decay is 0
};

struct Memory {
  float* residual;  // v
  float* velocity;  // u; unused by kResidual
};

// Updates the memory. Returns whether the gradient was finite everywhere, and every update.
bool Accumulate(const Array& gradient, const AccumulateParams& params, const ParallelFor& parallel_for, Memory memory);

// Updates the memory, then selects what reaches the threshold (>= 0) in the residual, in one pass; equal to Accumulate
// followed by FilterThreshold.
Status AccumulateFilter(const Array& gradient, const AccumulateParams& params, double threshold,
                        const ParallelFor& parallel_for, Memory memory, bool* finite, std::vector<int64_t>* indices);

// One of several tensors that share a selection: its elements follow `begin` others in it.
struct Part {
  Array gradient;
  AccumulateParams params;
  Memory memory;
  int64_t begin = 0;
};

// What of a part lies in [begin, end) of the selection, counted from `begin`.
Part CutPart(const Part& part, int64_t begin, int64_t end);

// The residuals of parts, which ascend and do not overlap, as one array of n, zero where there is no part: where they
// lie, if that is already one, or in `copy`.
const float* JoinResiduals(const std::vector<Part>& parts, int64_t n, std::vector<float>* copy);

// Updates the memory of the parts, then selects the top k of their residuals, joined; equal to Accumulate followed by
// SelectTopK, in one pass over memory where the threshold hint is good. finite[parts]: of each gradient.
Status AccumulateTopK(const std::vector<Part>& parts, int64_t n, const SelectParams& select,
                      const ParallelFor& parallel_for, bool* finite, Selection* selection);

// The same of one tensor alone.
Status AccumulateTopK(const Array& gradient, const AccumulateParams& params, const SelectParams& select,
                      const ParallelFor& parallel_for, Memory memory, bool* finite, Selection* selection);

}  // namespace hvd_sparse
