// Selection in each row of a matrix: masks and thresholds.
#pragma once

#include "dtype.h"
#include "parallel.h"
#include "status.h"

namespace hvd_sparse {

// A row-major matrix with at least one column.
struct Matrix {
  const void* data;
  int64_t rows;
  int64_t columns;
  DType dtype;  // one of the four types of an Array

  Array array() const { return {data, rows * columns, dtype}; }
};

// Returns InvalidArgument unless k is in [1, columns].
Status CheckRowCount(int64_t k, int64_t columns);

// Selects exactly k elements in every row, in this order: NaN by ascending column; nonzero numbers by descending
// magnitude, equal ones by a seeded hash of the column; zeros by ascending column. mask[rows * columns]: 1 for selected
// elements, else 0. thresholds[rows]: the magnitude of the k-th element.
Status SelectTopKRows(const Matrix& values, int64_t k, uint64_t seed, const ParallelFor& parallel_for, uint8_t* mask,
                      double* thresholds);

// Computes the ratio of the threshold to the mean magnitude of a row: -ln(density). Returns InvalidArgument unless the
// density is in (0, 1].
Status LaplaceFactor(double density, double* factor);

// Computes thresholds[rows]: the magnitude that a fraction `density` of a Laplace distribution with the row's mean
// magnitude reaches. NaN and infinities count as zero.
Status LaplaceThresholdRows(const Matrix& values, double density, const ParallelFor& parallel_for, double* thresholds);

// Sets mask[rows * columns] to 1 for NaN and for nonzero elements whose magnitude reaches the threshold of their row,
// else to 0. thresholds: one for each row, or one for all rows. Returns InvalidArgument for another count, and unless
// every threshold is a number >= 0.
Status FilterThresholdRows(const Matrix& values, const double* thresholds, int64_t count,
                           const ParallelFor& parallel_for, uint8_t* mask);

}  // namespace hvd_sparse
