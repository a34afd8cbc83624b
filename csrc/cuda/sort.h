// Indices in ascending order.
#pragma once

#include "launch.h"

namespace hvd_sparse {

// The bytes that sorting k indices takes, from the first of its own arrays on.
cudaError_t sort_indices_workspace_size(int64_t k, int64_t n, size_t* size);

// Sorts `count` indices of [0, n) from `indices` into `sorted`, another array.
cudaError_t sort_indices_launch(const int64_t* indices, int64_t count, int64_t n, void* workspace, size_t size,
                                int64_t* sorted, cudaStream_t stream);

}  // namespace hvd_sparse
