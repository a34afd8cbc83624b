#include "sort.h"

#include <cub/device/device_radix_sort.cuh>

namespace hvd_sparse {
namespace {

cudaError_t Sort(const uint64_t* numbers, int64_t count, BitRange bits, void* workspace, size_t* size, uint64_t* sorted,
                 cudaStream_t stream) {
  return cub::DeviceRadixSort::SortKeys(workspace, *size, numbers, sorted, count, bits.begin, bits.end, stream);
}

}  // namespace

cudaError_t sort_numbers_workspace_size(int64_t count, BitRange bits, size_t* size) {
  *size = 0;
  return Sort(nullptr, count, bits, nullptr, size, nullptr, nullptr);
}

cudaError_t sort_numbers_launch(const uint64_t* numbers, int64_t count, BitRange bits, void* workspace, size_t size,
                                uint64_t* sorted, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return Sort(numbers, count, bits, workspace, &size, sorted, stream);
}

}  // namespace hvd_sparse
