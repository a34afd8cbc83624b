// Entries that several ranks have sent, merged: their sums, and what two selections have in common.
#pragma once

#include <cstdint>

#include "status.h"

namespace hvd_sparse {

// Entries of several parts, which lie one after the other; in each, indices ascend from 0.
struct Parts {
  const int64_t* indices;
  const float* values;    // null: there are none, and no sums
  const int64_t* counts;  // of the entries of each part
  int64_t count;          // of parts
};

// Writes each index that occurs, ascending, and the sum of its values, added in the order of the parts; and how many
// there are. Room for all entries. InvalidArgument if the indices of a part do not ascend.
Status AddEntries(const Parts& parts, int64_t* indices, float* sums, int64_t* found);

// Sets common[i] to whether indices[i] is among others. Both ascend.
void FindCommon(const int64_t* indices, int64_t count, const int64_t* others, int64_t others_count, bool* common);

}  // namespace hvd_sparse
