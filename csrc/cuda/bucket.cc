#include "bucket.h"

#include <algorithm>

#include "accumulate.h"
#include "finite.h"
#include "pack.h"
#include "select.h"

namespace hvd_sparse {
namespace {

// The pieces of a workspace that the selections of a bucket use in turn.
struct SelectionWork {
  SelectionWork(void* base, const PayloadPlan& plan) {
    int64_t select_size = 0;
    status = select_top_k_workspace_size(DType::kFloat32, plan.n, plan.k, &select_size);
    Workspace workspace(base);
    select = workspace.Take<uint8_t>(select_size);
    pack = workspace.Take<uint8_t>(pack_workspace_size());
    indices = workspace.Take<int64_t>(plan.k);
    values = workspace.Take<float>(plan.k);
    size = workspace.used();
  }

  void* select;
  void* pack;
  int64_t* indices;
  float* values;
  int64_t size;
  cudaError_t status;
};

bool IsWhole(const BucketSelection& selection) {
  return selection.parts.size() == 1 && selection.parts[0].begin == 0 &&
         selection.parts[0].gradient.size == selection.plan.n;
}

cudaError_t Select(const BucketSelection& selection, bool active, double* info, bool* finite, const SelectionWork& work,
                   cudaStream_t stream) {
  if (!IsWhole(selection)) return cudaErrorNotSupported;
  const Part& part = selection.parts[0];
  const SelectOutput output{work.indices, work.values, info, selection.hint};
  if (active) {
    return accumulate_top_k_launch(part.gradient, part.params, selection.select, part.memory, finite, output,
                                   work.select, stream);
  }
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(all_finite_launch(part.gradient, finite, stream));
  return select_top_k_launch({part.memory.residual, selection.plan.n, DType::kFloat32}, selection.select, output,
                             work.select, stream);
}

}  // namespace

cudaError_t accumulate_bucket_workspace_size(const BucketSelections& selections, int64_t* size) {
  *size = 0;
  for (const BucketSelection& selection : selections) {
    const SelectionWork work(nullptr, selection.plan);
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.status);
    *size = std::max(*size, work.size);
  }
  return cudaSuccess;
}

cudaError_t accumulate_bucket_launch(const BucketSelections& selections, bool active, Centre /*centre*/, double* info,
                                     bool* finite, void* workspace, cudaStream_t stream) {
  for (const BucketSelection& selection : selections) {
    const SelectionWork work(workspace, selection.plan);
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.status);
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Select(selection, active, info, finite, work, stream));
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(
        pack_launch(selection.plan, work.indices, work.values, selection.plan.k, selection.payload, work.pack, stream));
    info += 2;
    finite += selection.parts.size();
  }
  return cudaSuccess;
}

int64_t clear_bucket_workspace_size(const SentSelections& selections) {
  int64_t size = 0;
  for (const SentSelection& selection : selections) size = std::max(size, unpack_workspace_size(selection.plan));
  return size;
}

cudaError_t clear_bucket_launch(const SentSelections& selections, DecodeStatus* status, void* workspace,
                                cudaStream_t stream) {
  for (const SentSelection& selection : selections) {
    for (const MemorySlice& slice : selection.slices) {
      if (slice.size != selection.plan.n) return cudaErrorNotSupported;
      HVD_SPARSE_CUDA_RETURN_IF_ERROR(clear_launch(selection.plan, selection.payload, slice.memory.residual,
                                                   slice.memory.velocity, status, workspace, stream));
    }
  }
  return cudaSuccess;
}

int64_t reduce_bucket_workspace_size(const SummedSelections& selections, int64_t ranks) {
  int64_t size = 0;
  for (const SummedSelection& selection : selections) {
    size = std::max(size, reduce_payloads_workspace_size(selection.plan, ranks));
  }
  return size;
}

cudaError_t reduce_bucket_launch(const SummedSelections& selections, int64_t ranks, int64_t stride, float scale,
                                 DecodeStatus* status, void* workspace, cudaStream_t stream) {
  for (const SummedSelection& selection : selections) {
    for (const Slice& slice : selection.slices) {
      if (slice.size != selection.plan.n) return cudaErrorNotSupported;
      HVD_SPARSE_CUDA_RETURN_IF_ERROR(reduce_payloads_launch(selection.plan, selection.first, ranks, stride, scale,
                                                             slice.out, status, workspace, stream));
    }
  }
  return cudaSuccess;
}

}  // namespace hvd_sparse
