// Runs many small jobs of the same kind in one launch. For small tensors, the overhead of a launch exceeds the work.
//
// The blocks of the grid are divided among the jobs by size. Kernels read the jobs from a table on the device. The
// table reaches the device as kernel arguments, so the host need not keep it until an asynchronous copy has finished,
// and a captured CUDA graph contains it.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "launch.h"

namespace hvd_sparse {

// The jobs of a launch, as a kernel argument.
template <typename Job>
struct Batch {
  Job one;                 // the job, if there is only one
  const Job* many;         // else the jobs, on the device
  const unsigned* starts;  // [count + 1]: the first block of each job
  int64_t count;
  unsigned blocks;  // total number of blocks
};

// Returns a batch of a single job.
template <typename Job>
Batch<Job> BatchOf(const Job& one, unsigned blocks) {
  Batch<Job> batch{};
  batch.one = one;
  batch.count = 1;
  batch.blocks = blocks;
  return batch;
}

// Collects the items of tables on the host and uploads them to the device.
class Tables {
 public:
  explicit Tables(void* base) : base_(static_cast<uint64_t*>(base)) {}

  // Adds items and returns their future address on the device.
  template <typename T>
  const T* Add(const std::vector<T>& items) {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= alignof(uint64_t), "copied by words");
    const size_t at = words_.size();
    const size_t bytes = items.size() * sizeof(T);
    words_.resize(at + (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t));
    if (bytes > 0) std::memcpy(words_.data() + at, items.data(), bytes);
    return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(base_) + at * sizeof(uint64_t));
  }

  // Adds jobs. sizes: the number of blocks for each job, at least 1.
  template <typename Job>
  Batch<Job> AddBatch(const std::vector<Job>& jobs, const std::vector<unsigned>& sizes) {
    if (jobs.size() == 1) return BatchOf(jobs[0], sizes[0]);
    Batch<Job> batch{};
    batch.many = Add(jobs);
    batch.count = static_cast<int64_t>(jobs.size());
    return Divide(batch, sizes);
  }

  // Returns the same jobs with other numbers of blocks, for kernels that have more or less to do.
  template <typename Job>
  Batch<Job> Divide(Batch<Job> batch, const std::vector<unsigned>& sizes) {
    if (batch.count == 1) return BatchOf(batch.one, sizes[0]);
    std::vector<unsigned> starts{0};
    for (const unsigned size : sizes) starts.push_back(starts.back() + size);
    batch.blocks = starts.back();
    batch.starts = Add(starts);
    return batch;
  }

  int64_t size() const { return static_cast<int64_t>(words_.size() * sizeof(uint64_t)); }

  cudaError_t Upload(cudaStream_t stream) const;

 private:
  uint64_t* base_;
  std::vector<uint64_t> words_;
};

}  // namespace hvd_sparse
