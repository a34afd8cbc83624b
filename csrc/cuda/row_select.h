// Selection in the rows of a matrix, on a device: what core/row_select.h says, bit for bit. A block selects in a row.
#pragma once

#include "../core/row_select.h"
#include "launch.h"

namespace hvd_sparse {

// mask[rows * columns], thresholds[rows]. k is in [1, columns], which are below 2^32.
cudaError_t select_top_k_rows_launch(const Matrix& values, int64_t k, uint64_t seed, uint8_t* mask, double* thresholds,
                                     cudaStream_t stream);

// thresholds[rows]; factor as LaplaceFactor gives it.
cudaError_t laplace_threshold_rows_launch(const Matrix& values, double factor, double* thresholds, cudaStream_t stream);

// mask[rows * columns]; thresholds[count] on the device, a count of 1 or rows. Nobody looks at them before: one below 0
// counts as 0, and NaN as infinity.
cudaError_t filter_threshold_rows_launch(const Matrix& values, const double* thresholds, int64_t count, uint8_t* mask,
                                         cudaStream_t stream);

}  // namespace hvd_sparse
