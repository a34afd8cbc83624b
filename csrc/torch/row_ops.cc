// torch.ops.hvd_sparse.*_rows for CPU tensors: selection in each row.
#include <torch/library.h>

#include <tuple>

#include "rows.h"

namespace hvd_sparse {
namespace {

std::tuple<Tensor, Tensor> SelectTopKRowsOp(const Tensor& values, int64_t k, int64_t seed) {
  const Tensor rows = values.contiguous();
  const Matrix matrix = AsMatrix("select_top_k_rows", rows);
  Tensor mask = at::empty({matrix.rows, matrix.columns}, at::kBool);
  Tensor thresholds = at::empty({matrix.rows}, at::kDouble);
  Raise("select_top_k_rows", SelectTopKRows(matrix, k, static_cast<uint64_t>(seed), TorchParallelFor, MaskData(mask),
                                            thresholds.mutable_data_ptr<double>()));
  return {mask, thresholds};
}

Tensor LaplaceThresholdRowsOp(const Tensor& values, double density) {
  const Tensor rows = values.contiguous();
  const Matrix matrix = AsMatrix("laplace_threshold_rows", rows);
  Tensor thresholds = at::empty({matrix.rows}, at::kDouble);
  Raise("laplace_threshold_rows",
        LaplaceThresholdRows(matrix, density, TorchParallelFor, thresholds.mutable_data_ptr<double>()));
  return thresholds;
}

Tensor FilterThresholdRowsOp(const Tensor& values, const Tensor& thresholds) {
  const Tensor rows = values.contiguous();
  const Matrix matrix = AsMatrix("filter_threshold_rows", rows);
  CheckThresholds("filter_threshold_rows", thresholds, matrix, at::kCPU);
  Tensor mask = at::empty({matrix.rows, matrix.columns}, at::kBool);
  Raise("filter_threshold_rows", FilterThresholdRows(matrix, thresholds.const_data_ptr<double>(), thresholds.numel(),
                                                     TorchParallelFor, MaskData(mask)));
  return mask;
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_FRAGMENT(hvd_sparse, m) {
  m.def("select_top_k_rows(Tensor values, int k, int seed) -> (Tensor, Tensor)");
  m.def("laplace_threshold_rows(Tensor values, float density) -> Tensor");
  m.def("filter_threshold_rows(Tensor values, Tensor thresholds) -> Tensor");
}

TORCH_LIBRARY_IMPL(hvd_sparse, CPU, m) {
  HVD_SPARSE_IMPL("select_top_k_rows", SelectTopKRowsOp);
  HVD_SPARSE_IMPL("laplace_threshold_rows", LaplaceThresholdRowsOp);
  HVD_SPARSE_IMPL("filter_threshold_rows", FilterThresholdRowsOp);
}
