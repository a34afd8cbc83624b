#include "batch.h"

namespace hvd_sparse {
namespace {

// Data passed as a kernel argument. Every device allows at least 4096 bytes of arguments.
struct Words {
  static constexpr int kCount = 500;
  uint64_t at[kCount];
};

__global__ void __launch_bounds__(kThreads) write_words_kernel(Words words, int count, uint64_t* to) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) to[i] = words.at[i];
}

}  // namespace

cudaError_t Tables::Upload(cudaStream_t stream) const {
  for (size_t at = 0; at < words_.size(); at += Words::kCount) {
    Words words;
    const size_t count = std::min<size_t>(Words::kCount, words_.size() - at);
    std::copy_n(words_.begin() + static_cast<int64_t>(at), count, words.at);
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(
        Launch(write_words_kernel, 1, kThreads, stream, words, static_cast<int>(count), base_ + at));
  }
  return cudaSuccess;
}

}  // namespace hvd_sparse
