// Exactly k of largest magnitude, on a device; see core/select.h. The result is a function of (values, k, seed) alone,
// and the same as the core's.
//
// One pass over the data gathers what reaches a hint; the k-th largest of these few is then found by the digits of its
// key. Were fewer than k gathered, or more than there is room for, the same kernels read all elements instead: which of
// the two it is they learn on the device.
#pragma once

#include <vector>

#include "../core/hint.h"
#include "../core/select.h"
#include "batch.h"
#include "select_state.h"

namespace hvd_sparse {

// Where a selection goes: all on the device.
struct SelectOutput {
  int64_t* indices;  // k, ascending
  void* values;      // k, of the element type; may be null
  double* info;      // the smallest selected magnitude; how many elements reached the hint, k if there was none
  Hint* hint;        // taken in place of params.threshold_hint, and updated; may be null
};

cudaError_t select_top_k_workspace_size(DType dtype, int64_t n, int64_t k, int64_t* size);

cudaError_t select_top_k_launch(const Array& values, const SelectParams& params, const SelectOutput& output,
                                void* workspace, cudaStream_t stream);

// Of several selections of float32 that are worked on together; n and k of each.
struct SelectSize {
  int64_t n;
  int64_t k;
};

// The pieces of their workspace.
struct SelectWork {
  SelectWork(void* base, const std::vector<SelectSize>& sizes);

  SelectState* states;
  std::vector<Candidates> candidates;
  int64_t total;   // of all k
  uint64_t* kept;  // of all selections, one after the other
  uint64_t* sorted;
  int bits;  // of an index; those of the selection's number are above
  int sort_bits;
  void* sort;
  size_t sort_size = 0;
  cudaError_t sort_status;
  int64_t size;
};

// Sets what the work holds for them, tells how many blocks each is worth.
template <typename T>
cudaError_t PrepareSelect(const SelectWork& work, std::vector<SelectJob<T>>* jobs, std::vector<unsigned>* blocks);

// Sets the bars. Between this and the other whoever has the data offers what reaches them.
cudaError_t begin_select_launch(const Batch<SelectJob<float>>& batch, const SelectWork& work, cudaStream_t stream);
cudaError_t cut_select_launch(const Batch<SelectJob<float>>& batch, const SelectWork& work, cudaStream_t stream);

}  // namespace hvd_sparse
