// Selects exactly k elements of largest magnitude on a device; see core/select.h. The result depends only on (values,
// k, seed), and equals the core's.
//
// One pass over the data gathers the elements that reach a hint. Radix selection then finds the k-th largest of these
// candidates. If there are fewer than k candidates, or more than there is room for, the same kernels read all elements
// instead. They decide this on the device.
#pragma once

#include <vector>

#include "../core/select.h"
#include "batch.h"
#include "select_state.h"
#include "sort.h"

namespace hvd_sparse {

// The outputs of a selection, all on the device.
struct SelectOutput {
  int64_t* indices;  // [k], ascending
  void* values;      // [k], of the element type
  double* info;      // the smallest selected magnitude, and the number of elements that reached the hint (k if none)
};

cudaError_t select_top_k_workspace_size(DType dtype, int64_t n, int64_t k, int64_t* size);

cudaError_t select_top_k_launch(const Array& values, const SelectParams& params, const SelectOutput& output,
                                void* workspace, cudaStream_t stream);

// n and k of one of several selections that run together.
struct SelectSize {
  int64_t n;
  int64_t k;
};

// The arrays of the workspace of several selections of elements with `item_size` bytes.
struct SelectWork {
  SelectWork(void* base, const std::vector<SelectSize>& sizes, int64_t item_size);

  SelectState* states;
  std::vector<CandidateBuffer> candidates;
  int64_t total;        // sum of all k
  uint64_t* kept;       // [total]: the selected indices of all selections, tagged
  bool carries_values;  // they are the upper half, and the lower half is the value: gathering values would be slow
  uint64_t* sorted;
  int bits;  // width of an index; the bits above are the number of the selection
  BitRange sort_range;
  void* sort;
  size_t sort_size = 0;
  cudaError_t sort_status;
  int64_t size;
};

// Sets the jobs' pointers into the workspace, and the number of blocks for each job.
template <typename T>
cudaError_t PrepareSelect(const SelectWork& work, std::vector<SelectJob<T>>* jobs, std::vector<unsigned>* blocks);

// begin_select_launch sets the bars. Then kernels that read the data offer the elements that reach these bars.
// cut_select_launch reduces the candidates to the selections.
cudaError_t begin_select_launch(const Batch<SelectJob<float>>& batch, const SelectWork& work, cudaStream_t stream);
cudaError_t cut_select_launch(const Batch<SelectJob<float>>& batch, const SelectWork& work, cudaStream_t stream);

}  // namespace hvd_sparse
