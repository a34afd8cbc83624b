#include "sort.h"

#include <cub/device/device_radix_sort.cuh>

namespace hvd_sparse {
namespace {

// Digits above those of n - 1 are zero in all of them.
int BitsOfIndices(int64_t n) {
  int bits = 1;
  while (bits < 63 && (n - 1) >> bits != 0) ++bits;
  return bits;
}

cudaError_t Sort(const int64_t* indices, int64_t count, int64_t n, void* workspace, size_t* size, int64_t* sorted,
                 cudaStream_t stream) {
  const auto* from = reinterpret_cast<const uint64_t*>(indices);  // none is negative
  auto* to = reinterpret_cast<uint64_t*>(sorted);
  return cub::DeviceRadixSort::SortKeys(workspace, *size, from, to, count, 0, BitsOfIndices(n), stream);
}

}  // namespace

cudaError_t sort_indices_workspace_size(int64_t k, int64_t n, size_t* size) {
  *size = 0;
  return Sort(nullptr, k, n, nullptr, size, nullptr, nullptr);
}

cudaError_t sort_indices_launch(const int64_t* indices, int64_t count, int64_t n, void* workspace, size_t size,
                                int64_t* sorted, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return Sort(indices, count, n, workspace, &size, sorted, stream);
}

}  // namespace hvd_sparse
