// Merges the entries of several ranks: sums of values, and the common indices of two selections.
#pragma once

#include <cstdint>

#include "status.h"

namespace hvd_sparse {

// Several lists of entries, concatenated. In each list, the indices ascend and are not negative.
struct EntryLists {
  const int64_t* indices;
  const float* values;
  const int64_t* counts;  // number of entries in each list
  int64_t count;          // number of lists
};

// Writes the ascending, distinct indices of all lists, the sum of the values at each, added in the order of the lists,
// and the number of indices, `found`. The outputs must have room for all entries. Returns InvalidArgument if the
// indices of a list do not ascend.
Status MergeEntries(const EntryLists& lists, int64_t* indices, float* sums, int64_t* found);

// Sets common[i] to whether `others` contains indices[i]. Both arrays must ascend.
void FindCommon(const int64_t* indices, int64_t count, const int64_t* others, int64_t others_count, bool* common);

}  // namespace hvd_sparse
