// Many small jobs of one kind in one launch: what costs little for each of many tensors costs more to launch.
//
// The grid's blocks are shared out among the jobs, as many to each as its size is worth. What a job is, kernels read
// from a table on the device. It gets there as arguments of kernels: nothing has to be kept for a copy that is still to
// come, and a captured graph holds it.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "launch.h"

namespace hvd_sparse {

// The jobs of a launch, as a kernel takes them.
template <typename Job>
struct Batch {
  Job one;                 // where there is one alone
  const Job* many;         // else, on the device
  const unsigned* starts;  // [count + 1]: the first block of each
  int64_t count;
  unsigned blocks;  // of them all
};

// One job alone, on so many blocks.
template <typename Job>
Batch<Job> BatchOf(const Job& one, unsigned blocks) {
  return {one, nullptr, nullptr, 1, blocks};
}

// What tables hold, on its way to the device.
class Tables {
 public:
  explicit Tables(void* base) : base_(static_cast<uint64_t*>(base)) {}

  // Where the items will lie.
  template <typename T>
  const T* Add(const std::vector<T>& items) {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= alignof(uint64_t), "copied by words");
    const size_t at = words_.size();
    const size_t bytes = items.size() * sizeof(T);
    words_.resize(at + (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t));
    if (bytes > 0) std::memcpy(words_.data() + at, items.data(), bytes);
    return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(base_) + at * sizeof(uint64_t));
  }

  // Jobs, each on as many blocks as `sizes` says, 1 at least.
  template <typename Job>
  Batch<Job> AddBatch(const std::vector<Job>& jobs, const std::vector<unsigned>& sizes) {
    unsigned blocks = 0;
    std::vector<unsigned> starts{0};
    for (const unsigned size : sizes) starts.push_back(blocks += size);
    if (jobs.size() == 1) return BatchOf(jobs[0], blocks);
    const Job* many = Add(jobs);
    return {Job{}, many, Add(starts), static_cast<int64_t>(jobs.size()), blocks};
  }

  int64_t size() const { return static_cast<int64_t>(words_.size() * sizeof(uint64_t)); }

  cudaError_t Upload(cudaStream_t stream) const;

 private:
  uint64_t* base_;
  std::vector<uint64_t> words_;
};

}  // namespace hvd_sparse
