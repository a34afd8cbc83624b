// From gradients to a payload, and what was sent out of the memory: of one tensor, or of several that share a
// selection.
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

// Updates the memory of the parts, selects `format.k` of their residuals, `format.n` elements joined, and packs them
// into `payload`, exactly PayloadSize bytes; see AccumulateTopK. Unless active the memory stays, and the selection is
// of what it holds. `select` has no say in k. The selection comes without its indices.
Status AccumulateAndPack(const std::vector<Part>& parts, bool active, SelectParams select, const PayloadFormat& format,
                         Level level, const ParallelFor& parallel_for, uint8_t* payload, bool* finite,
                         Selection* selection);

// What reaches `threshold` is selected; if k > 0, what reaches that of the k largest residuals instead, or is not zero:
// `threshold` then is a guess at it, that changes nothing but the time this takes, or 0. If k < 0, the -k largest are,
// and no more: equal magnitudes are ordered by a hash of the index; zeros are left out.
//
// If `fit` has stages, the threshold is fitted to what the residual becomes, so that about k reach it, and `threshold`
// is a guess at that, or 0; if no fit is of use, the k largest are selected and no more.
struct FilterParams {
  double threshold = 0;
  int64_t k = 0;
  FitParams fit = {};
};

// What a filter selected: the threshold that it took, and how many elements reached it; where one was fitted, how many
// of the sample reached it over how many should.
struct Filtered {
  double threshold = 0;
  int64_t count = 0;
  double ratio = 0;
};

// Updates the memory of a part, selects what reaches a threshold in its residual, and adds the payload to `message`,
// of `format` but for n, the part's size, and k, the count, at least 1; see AccumulateFilter. Unless active the memory
// stays, and the selection is of what it holds.
Status FilterAndPack(const Part& part, bool active, const FilterParams& filter, PayloadFormat format, Level level,
                     const ParallelFor& parallel_for, std::vector<uint8_t>* message, bool* finite, Filtered* filtered);

// The memory of elements [begin, begin + size) of a selection.
struct MemorySlice {
  int64_t begin;
  int64_t size;
  Memory memory;
};

// Takes what a payload of the rank's own says out of the residuals, and sets the velocities, if there are any, to zero
// there. Nothing is left of float32 values; of others, what rounding kept back; then `retained` times what was sent is
// added. The slices ascend and do not overlap.
Status ClearSent(const PayloadFormat& format, const uint8_t* payload, const std::vector<MemorySlice>& slices,
                 float retained = 0);

}  // namespace hvd_sparse
