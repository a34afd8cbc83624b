// torch.ops.hvd_sparse.*_rows for CUDA tensors: selection in each row. The ops do not wait for the device.
#include <torch/library.h>

#include <tuple>

#include "../cuda/row_select.h"
#include "cuda_arguments.h"
#include "rows.h"

namespace hvd_sparse {
namespace {

std::tuple<Tensor, Tensor> CudaSelectTopKRowsOp(const Tensor& values, int64_t k, int64_t seed) {
  const CudaCall call("select_top_k_rows", "values", values);
  const Tensor rows = values.contiguous();
  const Matrix matrix = AsMatrix(call.op(), rows);
  call.Check(CheckRowCount(k, matrix.columns));
  Tensor mask = call.Empty({matrix.rows, matrix.columns}, at::kBool);
  Tensor thresholds = call.Empty({matrix.rows}, at::kDouble);
  call.Run(select_top_k_rows_launch(matrix, k, static_cast<uint64_t>(seed), MaskData(mask),
                                    thresholds.mutable_data_ptr<double>(), call.stream()));
  return {mask, thresholds};
}

Tensor CudaLaplaceThresholdRowsOp(const Tensor& values, double density) {
  const CudaCall call("laplace_threshold_rows", "values", values);
  const Tensor rows = values.contiguous();
  const Matrix matrix = AsMatrix(call.op(), rows);
  double factor = 0;
  call.Check(LaplaceFactor(density, &factor));
  Tensor thresholds = call.Empty({matrix.rows}, at::kDouble);
  call.Run(laplace_threshold_rows_launch(matrix, factor, thresholds.mutable_data_ptr<double>(), call.stream()));
  return thresholds;
}

Tensor CudaFilterThresholdRowsOp(const Tensor& values, const Tensor& thresholds) {
  const CudaCall call("filter_threshold_rows", "values", values);
  const Tensor rows = values.contiguous();
  const Matrix matrix = AsMatrix(call.op(), rows);
  CheckThresholds(call.op(), thresholds, matrix, call.device());
  Tensor mask = call.Empty({matrix.rows, matrix.columns}, at::kBool);
  call.Run(filter_threshold_rows_launch(matrix, thresholds.const_data_ptr<double>(), thresholds.numel(), MaskData(mask),
                                        call.stream()));
  return mask;
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_IMPL(hvd_sparse, CUDA, m) {
  m.impl("select_top_k_rows", &hvd_sparse::CudaSelectTopKRowsOp);
  m.impl("laplace_threshold_rows", &hvd_sparse::CudaLaplaceThresholdRowsOp);
  m.impl("filter_threshold_rows", &hvd_sparse::CudaFilterThresholdRowsOp);
}
