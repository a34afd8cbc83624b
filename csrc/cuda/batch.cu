#include "batch.h"

namespace hvd_sparse {
namespace {

// Data passed as a kernel argument.
template <int kRoom>
struct Words {
  uint64_t at[kRoom];
};

constexpr int kFew = 500;  // every device allows 4 KiB of arguments
#if defined(CUDART_VERSION) && CUDART_VERSION >= 12010
constexpr int kMany = 4000;  // since CUDA 12.1, 32,764 bytes: the compiler and the driver must know it

bool TakesMany() {
  static const bool takes = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12010;
  }();
  return takes;
}
#else
constexpr int kMany = kFew;

bool TakesMany() { return false; }
#endif

template <int kRoom>
__global__ void __launch_bounds__(kThreads) write_words_kernel(Words<kRoom> words, int count, uint64_t* to) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < count) to[i] = words.at[i];
}

template <int kRoom>
cudaError_t Write(const uint64_t* from, size_t count, uint64_t* to, cudaStream_t stream) {
  Words<kRoom> words;
  std::copy_n(from, count, words.at);
  const unsigned blocks = BlocksFor(static_cast<int64_t>(count));
  return Launch(write_words_kernel<kRoom>, blocks, kThreads, stream, words, static_cast<int>(count), to);
}

}  // namespace

cudaError_t Tables::Upload(cudaStream_t stream) const {
  for (size_t at = 0; at < words_.size();) {
    const size_t left = words_.size() - at;
    const size_t count = std::min<size_t>(left, left > kFew && TakesMany() ? kMany : kFew);
    const auto write = count > kFew ? Write<kMany> : Write<kFew>;
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(write(words_.data() + at, count, base_ + at, stream));
    at += count;
  }
  return cudaSuccess;
}

}  // namespace hvd_sparse
