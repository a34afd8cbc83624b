// What a gradient does to the memory of one tensor. The buffers belong to the caller, and so does the choice of rule.
#pragma once

#include "dtype.h"
#include "parallel.h"
#include "select.h"
#include "status.h"
#include "update.h"

namespace hvd_sparse {

// g is the gradient as float32, with elements that are not finite taken as zero, times factor, plus weight_decay *
// parameter. Each product and each sum is rounded; nothing depends on the hardware.
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

// Updates the memory. Returns whether the gradient was finite everywhere.
bool Accumulate(const Array& gradient, const AccumulateParams& params, const ParallelFor& parallel_for, Memory memory);

// Updates the memory, then selects the top k of the residual; equal to Accumulate followed by SelectTopK, in one pass
// over memory where the threshold hint is good.
Status AccumulateTopK(const Array& gradient, const AccumulateParams& params, const SelectParams& select,
                      const ParallelFor& parallel_for, Memory memory, bool* finite, Selection* selection);

}  // namespace hvd_sparse
