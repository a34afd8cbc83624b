// From gradients to a payload, and what was sent out of the memory: of one tensor, or of several that share a
// selection.
#pragma once

#include <vector>

#include "accumulate.h"
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
                         Centre centre, const ParallelFor& parallel_for, uint8_t* payload, bool* finite,
                         Selection* selection);

// The memory of elements [begin, begin + size) of a selection.
struct MemorySlice {
  int64_t begin;
  int64_t size;
  Memory memory;
};

// Takes what a payload of the rank's own says out of the residuals, and sets the velocities, if there are any, to zero
// there. Nothing is left of float32 values; of others, what rounding kept back; then `kept` times what was sent is
// added. The slices ascend and do not overlap.
Status ClearSent(const PayloadFormat& format, const uint8_t* payload, const std::vector<MemorySlice>& slices,
                 float kept = 0);

}  // namespace hvd_sparse
