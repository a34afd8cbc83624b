// Tests whether every element is finite as float32, on a device; see core/finite.h.
#pragma once

#include "../core/dtype.h"
#include "launch.h"

namespace hvd_sparse {

// Sets *finite, which is on the device.
cudaError_t all_finite_launch(const Array& values, bool* finite, cudaStream_t stream);

}  // namespace hvd_sparse
