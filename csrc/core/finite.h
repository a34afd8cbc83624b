// Tests whether every element is finite as float32. A float64 above the range of float32 is not, because residuals are
// float32.
#pragma once

#include "dtype.h"
#include "parallel.h"

namespace hvd_sparse {

bool AllFinite(const Array& values, const ParallelFor& parallel_for);

}  // namespace hvd_sparse
