// Rounds values to 16 bits on a device; see core/quantize.h.
#pragma once

#include "../core/quantize.h"
#include "launch.h"

namespace hvd_sparse {

// Sets result[n] to the float32 values that the receiver will decode. `result` may be `values`.
cudaError_t quantize_launch(const float* values, int64_t n, DType dtype, float* result, cudaStream_t stream);

}  // namespace hvd_sparse
