// Adds gradients to the error feedback (residual and velocity) of one tensor or of several. The caller owns the buffers
// and chooses the rule.
#pragma once

#include <vector>

#include "dtype.h"
#include "parallel.h"
#include "select.h"
#include "status.h"
#include "update.h"

namespace hvd_sparse {

// The rules add g = factor * gradient + weight_decay * parameter, computed in float32. Gradient elements that are not
// finite count as zero. If g is not finite, g is zero. If the update of an element overflows, its residual and velocity
// do not change. In each of these cases the functions below report a gradient that is not finite. Every product and
// every sum is rounded, so the results do not depend on the hardware.
struct AccumulateParams {
  AccumulateRule rule = AccumulateRule::kResidual;
  float factor = 1;
  float momentum = 0;
  float weight_decay = 0;
  const float* parameter = nullptr;  // same size as the gradient; may be null if weight_decay is 0
};

// The error feedback of a tensor, with as many elements as its gradient.
struct Feedback {
  float* residual;  // v
  float* velocity;  // u; unused by kResidual
};

// Updates the error feedback. Returns whether all gradient elements and all updates were finite.
bool Accumulate(const Array& gradient, const AccumulateParams& params, const ParallelFor& parallel_for,
                Feedback feedback);

// Updates the error feedback and selects the residual elements that reach the threshold (>= 0), in one pass. The result
// equals Accumulate followed by FilterThreshold.
Status AccumulateFilter(const Array& gradient, const AccumulateParams& params, double threshold,
                        const ParallelFor& parallel_for, Feedback feedback, bool* finite,
                        std::vector<int64_t>* indices);

// One of several tensors in a joint selection. Its elements start at offset `begin` of the joined tensors.
struct Part {
  Array gradient;
  AccumulateParams params;
  Feedback feedback;
  int64_t begin = 0;
};

// Returns the section of a part that lies in [begin, end) of the joined tensors, with offsets relative to `begin`.
Part CutPart(const Part& part, int64_t begin, int64_t end);

// Returns the residuals of the parts as one array of n elements if they already are one in memory, else null. Only
// computes with the addresses, which may be those of a device.
float* ContiguousResiduals(const std::vector<Part>& parts, int64_t n);

// Returns the residuals of the parts as one array of n elements, with zeros where there is no part. The parts must
// ascend and not overlap. If they are not already contiguous in memory, the array is in `copy`.
const float* JoinResiduals(const std::vector<Part>& parts, int64_t n, std::vector<float>* copy);

template <typename T>
class Candidates;  // in candidates.h, which kernels do not need

// Updates the error feedback of the parts, and gathers the elements of the joined residuals (n elements) that reach the
// threshold of `none`, which is an empty set of candidates.
Candidates<float> AccumulateCandidates(const std::vector<Part>& parts, int64_t n, const Candidates<float>& none,
                                       const ParallelFor& parallel_for, bool* finite);

// Updates the error feedback of the parts, then selects the k largest of the joined residuals, n elements. The result
// equals Accumulate followed by SelectTopK. A good threshold hint makes a single pass over the data suffice.
// finite[parts]: whether each gradient was finite.
Status AccumulateTopK(const std::vector<Part>& parts, int64_t n, const SelectParams& select,
                      const ParallelFor& parallel_for, bool* finite, Selection* selection);

// The same for a single tensor.
Status AccumulateTopK(const Array& gradient, const AccumulateParams& params, const SelectParams& select,
                      const ParallelFor& parallel_for, Feedback feedback, bool* finite, Selection* selection);

}  // namespace hvd_sparse
