// What survives the wire in 16 bits, on a device; see core/quantize.h.
#pragma once

#include "../core/quantize.h"
#include "launch.h"

namespace hvd_sparse {

// values and result: n elements; they may be the same array.
cudaError_t quantize_launch(const float* values, int64_t n, DType dtype, float* result, cudaStream_t stream);

}  // namespace hvd_sparse
