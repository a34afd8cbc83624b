// Selection in each row of a matrix on a device, bit-identical to core/row_select.h. One block processes a row.
#pragma once

#include "../core/row_select.h"
#include "launch.h"

namespace hvd_sparse {

// Sets mask[rows * columns] and thresholds[rows]. k must be in [1, columns], and columns below 2^32.
cudaError_t select_top_k_rows_launch(const Matrix& values, int64_t k, uint64_t seed, uint8_t* mask, double* thresholds,
                                     cudaStream_t stream);

// Sets thresholds[rows]. factor: see LaplaceFactor.
cudaError_t laplace_threshold_rows_launch(const Matrix& values, double factor, double* thresholds, cudaStream_t stream);

// Sets mask[rows * columns]. thresholds[count] are on the device; count is 1 or rows. They are not checked: a negative
// threshold counts as 0, and NaN as infinity.
cudaError_t filter_threshold_rows_launch(const Matrix& values, const double* thresholds, int64_t count, uint8_t* mask,
                                         cudaStream_t stream);

}  // namespace hvd_sparse
