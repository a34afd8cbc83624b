// Selects the elements that reach a threshold, on a device. The host must know their number to allocate the output, so
// it counts, waits for the result, and then writes.
#pragma once

#include "../core/dtype.h"
#include "launch.h"

namespace hvd_sparse {

// Sets *count, on the device, to the number of magnitudes that are at least `threshold` (>= 0). NaN is never counted.
cudaError_t count_reaching_launch(const Array& values, double threshold, unsigned long long* count,
                                  cudaStream_t stream);

// Computes the bytes of workspace for writing `count` indices.
cudaError_t filter_threshold_workspace_size(int64_t n, int64_t count, int64_t* size);

// Writes the ascending indices and the values of the `count` > 0 elements that reach the threshold.
cudaError_t filter_threshold_launch(const Array& values, double threshold, int64_t count, int64_t* indices,
                                    void* selected, void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
