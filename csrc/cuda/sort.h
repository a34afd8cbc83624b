// Sorts numbers in ascending order.
#pragma once

#include "launch.h"

namespace hvd_sparse {

// Returns the number of bits of the numbers in [0, n), at least 1.
inline int BitsBelow(int64_t n) {
  int bits = 1;
  while (bits < 63 && (n - 1) >> bits != 0) ++bits;
  return bits;
}

// Bits [begin, end) of a number, end <= 64.
struct BitRange {
  int begin;
  int end;
};

// Computes the bytes of workspace for sorting `count` numbers.
cudaError_t sort_numbers_workspace_size(int64_t count, BitRange bits, size_t* size);

// Writes the numbers to `sorted`, which must be a different array, in ascending order of these bits.
cudaError_t sort_numbers_launch(const uint64_t* numbers, int64_t count, BitRange bits, void* workspace, size_t size,
                                uint64_t* sorted, cudaStream_t stream);

}  // namespace hvd_sparse
