// Numbers in ascending order.
#pragma once

#include "launch.h"

namespace hvd_sparse {

// How many bits the numbers of [0, n) have, 1 at least.
inline int BitsBelow(int64_t n) {
  int bits = 1;
  while (bits < 63 && (n - 1) >> bits != 0) ++bits;
  return bits;
}

// The bytes that sorting `count` numbers below 2^bits, bits <= 63, takes.
cudaError_t sort_numbers_workspace_size(int64_t count, int bits, size_t* size);

// Sorts from `numbers` into `sorted`, another array.
cudaError_t sort_numbers_launch(const uint64_t* numbers, int64_t count, int bits, void* workspace, size_t size,
                                uint64_t* sorted, cudaStream_t stream);

}  // namespace hvd_sparse
