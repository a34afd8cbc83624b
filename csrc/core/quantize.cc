#include "quantize.h"

namespace hvd_sparse {

void Quantize(const float* values, int64_t n, DType dtype, float* result) {
  for (int64_t i = 0; i < n; ++i) result[i] = QuantizeOne(values[i], dtype);
}

}  // namespace hvd_sparse
