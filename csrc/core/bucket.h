// Compresses the gradients of one tensor, or of several in a joint selection, into a payload, and removes the sent
// values from the error feedback.
#pragma once

#include <vector>

#include "accumulate.h"
#include "fit.h"
#include "low_bit.h"
#include "parallel.h"
#include "payload.h"
#include "select.h"
#include "status.h"

namespace hvd_sparse {

// Updates the error feedback of the parts, selects `format.k` of the `format.n` joined residuals, and packs them into
// `payload`, exactly PayloadSize bytes; see AccumulateTopK. If `active` is false, the error feedback does not change
// and the selection uses the stored residuals. `select.k` is ignored. The returned selection has no indices.
Status AccumulateAndPack(const std::vector<Part>& parts, bool active, SelectParams select, const PayloadFormat& format,
                         Level level, const ParallelFor& parallel_for, uint8_t* payload, bool* finite,
                         Selection* selection);

// Which elements a filter selects.
enum class FilterKind {
  kThreshold,  // all that reach `threshold`
  kWithTies,   // all nonzero elements that reach the magnitude of the k-th largest; with ties, more than k
  kExactly,    // exactly the k largest, without zeros; a hash of the index orders equal magnitudes
  kFitted,     // all that reach a threshold fitted to the updated residual, so that about k elements reach it; if the
               // fit fails, kExactly
};

// Unless the kind is kThreshold, `threshold` is a guess at the resulting threshold, or 0. It changes only the run time.
struct FilterParams {
  FilterKind kind = FilterKind::kThreshold;
  double threshold = 0;
  int64_t k = 0;       // >= 1; unused by kThreshold
  FitParams fit = {};  // of kFitted
};

// Returns the filter that the operators describe by k and the stages of a fit: kFitted if there are any; else
// kThreshold for k == 0, and kWithTies.
FilterParams MakeFilter(double threshold, int64_t k, const FitParams& fit);

// Checks what FilterAndPack requires of its arguments. A bucket checks all members before it changes the first one.
Status CheckFilter(const Part& part, const FilterParams& filter, PayloadFormat format);

// The result of a filter: its threshold and the number of elements that reached it.
struct Filtered {
  double threshold = 0;
  int64_t count = 0;
};

// Updates the error feedback of a part, selects with a filter, and appends the payload to `message`; see
// AccumulateFilter. In the payload's format, n is the size of the part, and k is the number of selected elements, at
// least 1. If `active` is false, the error feedback does not change and the selection uses the stored residual.
Status FilterAndPack(const Part& part, bool active, const FilterParams& filter, PayloadFormat format, Level level,
                     const ParallelFor& parallel_for, std::vector<uint8_t>* message, bool* finite, Filtered* filtered);

// The error feedback of elements [begin, begin + size) of a selection.
struct FeedbackSlice {
  int64_t begin;
  int64_t size;
  Feedback feedback;
};

// Subtracts the values of this rank's own payload from the residuals, and sets the velocities there, if any, to zero.
// The residual of a sent element becomes zero for float32 values, and the rounding error for other types. Then
// `retained` times the sent value is added. The slices must ascend and not overlap.
Status ClearSent(const PayloadFormat& format, const uint8_t* payload, const std::vector<FeedbackSlice>& slices,
                 float retained = 0);

}  // namespace hvd_sparse
