// Finds a threshold that k of n magnitudes reach, on a device; see core/threshold.h.
#pragma once

#include "../core/threshold.h"
#include "launch.h"

namespace hvd_sparse {

int64_t select_threshold_workspace_size(DType dtype, const ThresholdPlan& plan);

// `plan` must be made for these values. *threshold is on the device.
cudaError_t select_threshold_launch(const Array& values, const ThresholdPlan& plan, uint64_t seed, double* threshold,
                                    void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
