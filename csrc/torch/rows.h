// Argument checks shared by the ops on rows, on every device.
#pragma once

#include "../core/row_select.h"
#include "arguments.h"

namespace hvd_sparse {

// Returns a tensor as a matrix. `contiguous` must outlive the result.
inline Matrix AsMatrix(const char* op, const Tensor& contiguous) {
  TORCH_CHECK_VALUE(contiguous.dim() == 2 && contiguous.size(1) > 0, "hvd_sparse.", op,
                    ": values must be a matrix with at least one column, got ", contiguous.sizes());
  const Array flat = AsArray(op, contiguous);
  return {flat.data, contiguous.size(0), contiguous.size(1), flat.dtype};
}

// Checks thresholds: one for each row, or one for all rows, on the device of the values.
inline void CheckThresholds(const char* op, const Tensor& thresholds, const Matrix& values, at::Device device) {
  CheckTensor(op, "thresholds", thresholds, at::kDouble, device);
  TORCH_CHECK_VALUE(thresholds.dim() == 1 && (thresholds.numel() == 1 || thresholds.numel() == values.rows),
                    "hvd_sparse.", op, ": thresholds must have 1 or ", values.rows, " elements, got shape ",
                    thresholds.sizes());
}

inline uint8_t* MaskData(Tensor& mask) { return static_cast<uint8_t*>(mask.data_ptr()); }

}  // namespace hvd_sparse
