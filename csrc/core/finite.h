// Is every element a finite float32? Residuals are float32, so a larger float64 counts as an overflow.
#pragma once

#include "dtype.h"
#include "parallel.h"

namespace hvd_sparse {

bool AllFinite(const Array& values, const ParallelFor& parallel_for);

}  // namespace hvd_sparse
