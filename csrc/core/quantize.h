// Values on the wire in 16 bits: float16 and bfloat16, rounded to nearest even.
#pragma once

#include "dtype.h"

namespace hvd_sparse {

// A finite value too large for the type becomes its largest finite one: what is cut off stays in the residual,
// where an infinity would destroy it. Infinities and NaN stay what they are.
Float16 ToFloat16(float value);
BFloat16 ToBFloat16(float value);

// The float32 that survives the wire as `dtype`, none of the low-bit ones (see low_bit.h). values and result: n
// elements; they may be the same array.
void Quantize(const float* values, int64_t n, DType dtype, float* result);

}  // namespace hvd_sparse
