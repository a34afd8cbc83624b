// Entries of several ranks merged, and the changes of a parameter server, as plain C functions on pointers, for
// `hvd_sparse.native_changes`. The caller checks the sizes and types of arrays, as in ops.cc.
#include <algorithm>
#include <iterator>
#include <vector>

#include "../core/changes.h"
#include "../core/checksum.h"
#include "../core/marks.h"
#include "../core/merge.h"
#include "report.h"

using hvd_sparse::Guarded;

// counts[parts]; sum_indices and sums: room for all entries; found: how many there are.
HVD_SPARSE_API int hvd_sparse_add_entries(const int64_t* indices, const float* values, const int64_t* counts,
                                          int64_t parts, int64_t* sum_indices, float* sums, int64_t* found,
                                          char* message) {
  return Guarded(message,
                 [&] { return hvd_sparse::MergeEntries({indices, values, counts, parts}, sum_indices, sums, found); });
}

// common[count].
HVD_SPARSE_API int hvd_sparse_find_common(const int64_t* indices, int64_t count, const int64_t* others,
                                          int64_t others_count, bool* common, char* message) {
  return Guarded(message, [&] {
    hvd_sparse::FindCommon(indices, count, others, others_count, common);
    return hvd_sparse::Status::Ok();
  });
}

// parameters[n]; counts[BlockCount(n)] and places[count]: what changed.
HVD_SPARSE_API int hvd_sparse_apply_update(const int64_t* indices, const float* values, int64_t count,
                                           float* parameters, int64_t n, uint32_t* counts, uint16_t* places,
                                           char* message) {
  return Guarded(message,
                 [&] { return hvd_sparse::ApplyUpdate(indices, values, count, parameters, n, counts, places); });
}

// counts and places: of an update, as apply_update wrote them; clocks[n].
HVD_SPARSE_API int hvd_sparse_set_clocks(const uint32_t* counts, const uint16_t* places, int64_t n, uint32_t clock,
                                         uint32_t* clocks, char* message) {
  return Guarded(message, [&] { return hvd_sparse::SetClocks({counts, places}, n, clock, clocks); });
}

// counts and places: of each update, as apply_update wrote them; marks[(n + 63) / 64]; marked: how many there are.
HVD_SPARSE_API int hvd_sparse_mark_updates(const uint32_t* const* counts, const uint16_t* const* places,
                                           int64_t updates, int64_t n, uint64_t* marks, int64_t* marked,
                                           char* message) {
  return Guarded(message, [&] {
    std::vector<hvd_sparse::Changed> changed;
    for (int64_t u = 0; u < updates; ++u) changed.push_back({counts[u], places[u]});
    return hvd_sparse::MarkUpdates(changed, n, marks, marked);
  });
}

HVD_SPARSE_API int hvd_sparse_mark_changed_after(const uint32_t* clocks, int64_t n, uint32_t after, uint64_t* marks,
                                                 int64_t* marked, char* message) {
  return Guarded(message, [&] {
    *marked = hvd_sparse::MarkChangedAfter(clocks, n, after, marks);
    return hvd_sparse::Status::Ok();
  });
}

// values[form->n]; payload: as many bytes as `hvd_sparse.wire.payload_size` says.
HVD_SPARSE_API int hvd_sparse_pack_marked(const HvdSparseForm* form, const float* values, const uint64_t* marks,
                                          uint8_t* payload, char* message) {
  return Guarded(message, [&] { return hvd_sparse::PackMarked(hvd_sparse::FormatOf(*form), values, marks, payload); });
}

// minuend and subtrahend: `end` elements; indices and values: room for k; info[4]: how many are selected, how many
// reach the floor, the next floor, whether there was NaN.
HVD_SPARSE_API int hvd_sparse_select_marked(const float* minuend, const float* subtrahend, int64_t begin, int64_t end,
                                            int64_t k, uint64_t seed, double floor, uint64_t* marks, int64_t* indices,
                                            float* values, double* info, char* message) {
  return Guarded(message, [&] {
    hvd_sparse::MarkedSelection selected;
    hvd_sparse::Status status =
        hvd_sparse::SelectMarked({minuend, subtrahend, begin, end}, k, seed, floor, marks, &selected);
    if (!status.ok()) return status;
    std::copy(selected.indices.begin(), selected.indices.end(), indices);
    std::copy(selected.values.begin(), selected.values.end(), values);
    const double numbers[] = {static_cast<double>(selected.indices.size()), static_cast<double>(selected.reaching),
                              selected.floor, selected.has_nan ? 1.0 : 0.0};
    std::copy(std::begin(numbers), std::end(numbers), info);
    return status;
  });
}

// minuend[n], subtrahend[n].
HVD_SPARSE_API int hvd_sparse_add_marked(const int64_t* indices, const float* values, int64_t count,
                                         const float* minuend, double floor, int64_t n, float* subtrahend,
                                         uint64_t* marks, char* message) {
  return Guarded(message,
                 [&] { return hvd_sparse::AddMarked(indices, values, count, minuend, floor, n, subtrahend, marks); });
}

HVD_SPARSE_API int hvd_sparse_crc32(const uint8_t* data, int64_t size, uint32_t* crc, char* message) {
  return Guarded(message, [&] {
    *crc = hvd_sparse::Crc32(data, static_cast<size_t>(size));
    return hvd_sparse::Status::Ok();
  });
}

// payload: a result of hvd_sparse_pack or hvd_sparse_pack_marked.
HVD_SPARSE_API int hvd_sparse_sealed_crc(const uint8_t* payload, int64_t size, uint32_t* crc, char* message) {
  return Guarded(message, [&] {
    *crc = hvd_sparse::SealedCrc(payload, size);
    return hvd_sparse::Status::Ok();
  });
}

// minuend[n], subtrahend[n]; indices[k]; info[2]: threshold, and how many reached the hint.
HVD_SPARSE_API int hvd_sparse_select_top_k_of_difference(const float* minuend, const float* subtrahend, int64_t n,
                                                         int64_t k, uint64_t seed, double hint, int64_t* indices,
                                                         double* info, char* message) {
  return Guarded(message, [&] {
    hvd_sparse::Selection selection;
    const hvd_sparse::Status status =
        hvd_sparse::SelectTopKOfDifference(minuend, subtrahend, n, {k, hint, seed}, hvd_sparse::SerialFor, &selection);
    return hvd_sparse::CopySelection(status, selection, indices, info);
  });
}
