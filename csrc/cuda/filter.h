// What reaches a threshold, on a device. How many that is, the host has to know before it can make room: count, wait,
// write.
#pragma once

#include "../core/dtype.h"
#include "launch.h"

namespace hvd_sparse {

// Sets *count, on the device, to how many magnitudes are at least `threshold` (>= 0); NaN never is.
cudaError_t count_reaching_launch(const Array& values, double threshold, unsigned long long* count,
                                  cudaStream_t stream);

// The bytes that writing `count` indices takes.
cudaError_t filter_threshold_workspace_size(int64_t n, int64_t count, int64_t* size);

// Writes the indices, ascending, and values of the `count` > 0 elements that reach the threshold.
cudaError_t filter_threshold_launch(const Array& values, double threshold, int64_t count, int64_t* indices,
                                    void* selected, void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
