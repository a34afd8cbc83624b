// Selection in the rows of a matrix, each for itself: masks and thresholds.
#pragma once

#include "dtype.h"
#include "parallel.h"
#include "status.h"

namespace hvd_sparse {

// Row after row; at least one column.
struct Matrix {
  const void* data;
  int64_t rows;
  int64_t columns;
  DType dtype;  // one of the four types that an Array has

  Array array() const { return {data, rows * columns, dtype}; }
};

// InvalidArgument unless k is in [1, columns].
Status CheckRowCount(int64_t k, int64_t columns);

// Exactly k in every row: NaN by lower column; larger magnitude first, equal ones by a seeded hash of the column; zeros
// by lower column. mask[rows * columns]: 1 for what is kept, 0 elsewhere. thresholds[rows]: the magnitude of the k-th.
Status SelectTopKRows(const Matrix& values, int64_t k, uint64_t seed, const ParallelFor& parallel_for, uint8_t* mask,
                      double* thresholds);

// What the mean magnitude of a row is multiplied by: -ln(density). InvalidArgument unless density is in (0, 1].
Status LaplaceFactor(double density, double* factor);

// thresholds[rows]: the magnitude that a part `density` of a Laplace distribution of the row's mean magnitude reaches.
// NaN and infinities count as zero.
Status LaplaceThresholdRows(const Matrix& values, double density, const ParallelFor& parallel_for, double* thresholds);

// mask[rows * columns]: 1 for a NaN, and for a magnitude that is not zero and reaches its row's threshold. thresholds:
// one for each row, or one for all; InvalidArgument for another count, or if one is not a number >= 0.
Status FilterThresholdRows(const Matrix& values, const double* thresholds, int64_t count,
                           const ParallelFor& parallel_for, uint8_t* mask);

}  // namespace hvd_sparse
