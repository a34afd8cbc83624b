// Entries of several ranks merged, and the changes of a parameter server, as plain C functions on pointers, for
// `hvd_sparse.native_changes`. Sizes and types of arrays are the caller's business, as in ops.cc.
#include <algorithm>

#include "../core/changes.h"
#include "../core/merge.h"
#include "report.h"

using hvd_sparse::Report;

// counts[parts]; values and sums may be null; sum_indices and sums: room for all entries; found: how many there are.
HVD_SPARSE_API int hvd_sparse_add_entries(const int64_t* indices, const float* values, const int64_t* counts,
                                          int64_t parts, int64_t* sum_indices, float* sums, int64_t* found,
                                          char* message) {
  return Report(hvd_sparse::AddEntries({indices, values, counts, parts}, sum_indices, sums, found), message);
}

// common[count].
HVD_SPARSE_API int hvd_sparse_find_common(const int64_t* indices, int64_t count, const int64_t* others,
                                          int64_t others_count, bool* common, char* /*message*/) {
  hvd_sparse::FindCommon(indices, count, others, others_count, common);
  return 0;
}

// parameters[n], clocks[n].
HVD_SPARSE_API int hvd_sparse_apply_update(const int64_t* indices, const float* values, int64_t count, uint32_t clock,
                                           float* parameters, uint32_t* clocks, int64_t n, char* message) {
  return Report(hvd_sparse::ApplyUpdate(indices, values, count, clock, {parameters, clocks, n}), message);
}

// indices: room for n; found: how many there are.
HVD_SPARSE_API int hvd_sparse_changed_after(const uint32_t* clocks, int64_t n, uint32_t after, int64_t* indices,
                                            int64_t* found, char* /*message*/) {
  *found = hvd_sparse::ChangedAfter(clocks, n, after, indices);
  return 0;
}

// minuend[n], subtrahend[n]; indices[k]; info[2]: threshold, and how many reached the hint.
HVD_SPARSE_API int hvd_sparse_select_top_k_of_difference(const float* minuend, const float* subtrahend, int64_t n,
                                                         int64_t k, uint64_t seed, double hint, int64_t* indices,
                                                         double* info, char* message) {
  hvd_sparse::Selection selection;
  const hvd_sparse::Status status =
      hvd_sparse::SelectTopKOfDifference(minuend, subtrahend, n, {k, hint, seed}, hvd_sparse::SerialFor, &selection);
  if (!status.ok()) return Report(status, message);
  std::copy(selection.indices.begin(), selection.indices.end(), indices);
  info[0] = selection.threshold;
  info[1] = static_cast<double>(selection.passed);
  return 0;
}
