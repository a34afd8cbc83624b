// Is every element a finite float32? See core/finite.h.
#pragma once

#include "../core/dtype.h"
#include "launch.h"

namespace hvd_sparse {

// Sets *finite, on the device.
cudaError_t all_finite_launch(const Array& values, bool* finite, cudaStream_t stream);

}  // namespace hvd_sparse
