// Merges the entries of several ranks: sums of values, and the common indices of two selections.
#pragma once

#include <cstdint>

#include "status.h"

namespace hvd_sparse {

// The concatenated entries of several parts. In each part, indices ascend from 0.
struct Parts {
  const int64_t* indices;
  const float* values;    // null: no values, so no sums are computed
  const int64_t* counts;  // number of entries in each part
  int64_t count;          // number of parts
};

// Writes the ascending, distinct indices of all parts, the sum of the values at each, added in the order of the parts,
// and the number of indices, `found`. The outputs must have room for all entries. Returns InvalidArgument if the
// indices of a part do not ascend.
Status AddEntries(const Parts& parts, int64_t* indices, float* sums, int64_t* found);

// Sets common[i] to whether `others` contains indices[i]. Both arrays must ascend.
void FindCommon(const int64_t* indices, int64_t count, const int64_t* others, int64_t others_count, bool* common);

}  // namespace hvd_sparse
