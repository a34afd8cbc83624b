#include "accumulate.h"

#include <map>
#include <tuple>

#include "batch.cuh"
#include "gather.cuh"

namespace hvd_sparse {
namespace {

constexpr int kWidth = 4;   // consecutive elements of a thread
constexpr int kRounds = 4;  // iterations of a block: enough to hide its start, few enough for a balanced end

// Elements that a thread reads or writes in one instruction, or two.
template <typename T>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
  T at[kWidth];
};

// An array, and whether its packs can be read and written in one instruction.
template <typename T>
struct Packs {
  __device__ Packs(T* data, int64_t n)
      : data(data), n(n), is_aligned(reinterpret_cast<uintptr_t>(data) % alignof(Pack<std::remove_const_t<T>>) == 0) {}

  // Elements at n and beyond count as zero.
  __device__ Pack<std::remove_const_t<T>> Load(int64_t first) const {
    using P = Pack<std::remove_const_t<T>>;
    if (is_aligned && first + kWidth <= n) return *reinterpret_cast<const P*>(data + first);
    P pack{};
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      if (first + e < n) pack.at[e] = data[first + e];
    }
    return pack;
  }

  __device__ void Store(const Pack<T>& pack, int64_t first) const {
    if (is_aligned && first + kWidth <= n) {
      *reinterpret_cast<Pack<T>*>(data + first) = pack;
      return;
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      if (first + e < n) data[first + e] = pack.at[e];
    }
  }

  T* data;
  int64_t n;
  bool is_aligned;
};

// The arrays of a job.
template <typename T>
struct JobPacks {
  __device__ explicit JobPacks(const AccumulateJob& job)
      : gradient(static_cast<const T*>(job.gradient.data), job.gradient.size),
        parameter(job.params.parameter, job.gradient.size),
        residual(job.feedback.residual, job.gradient.size),
        velocity(job.feedback.velocity, job.gradient.size) {}

  Packs<const T> gradient;
  Packs<const float> parameter;
  Packs<float> residual;
  Packs<float> velocity;
};

// Updates the pack at `first` and returns its residual.
template <typename T, AccumulateRule rule>
__device__ Pack<float> UpdatePack(const JobPacks<T>& packs, int64_t first, const AccumulateParams& params, bool active,
                                  bool* finite) {
  const bool decays = params.weight_decay != 0 && params.parameter != nullptr;
  const Pack<T> incoming = packs.gradient.Load(first);
  Pack<float> residual = packs.residual.Load(first);
  Pack<float> velocity{};
  Pack<float> parameter{};
  if constexpr (rule != AccumulateRule::kResidual) velocity = packs.velocity.Load(first);
  if (decays) parameter = packs.parameter.Load(first);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    const float local = Incoming(incoming.at[e], params.factor, parameter.at[e], params.weight_decay, decays, finite);
    if (active) *finite &= Update<rule>(local, params.momentum, &velocity.at[e], &residual.at[e]);
  }
  if (!active) return residual;
  if constexpr (rule != AccumulateRule::kResidual) packs.velocity.Store(velocity, first);
  packs.residual.Store(residual, first);
  return residual;
}

template <typename T, AccumulateRule rule>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(Batch<AccumulateJob> batch) {
  __shared__ CollectedCandidates collected;
  const Share<AccumulateJob> share = ShareOf(batch);
  const AccumulateJob& job = share.job;
  const JobPacks<T> packs(job);
  const int64_t n = job.gradient.size;
  const int64_t count = (n + kWidth - 1) / kWidth;
  const bool gathers = job.candidates.state != nullptr;
  const uint64_t bar = gathers ? job.candidates.state->bar : 0;
  const WriteCandidate write{job.candidates};
  bool all_finite = true;
  if (gathers) collected.Begin();
  for (int64_t base = int64_t{share.block} * kThreads; base < count; base += int64_t{share.blocks} * kThreads) {
    const int64_t first = (base + threadIdx.x) * kWidth;
    Pack<float> residual{};
    if (first < n) residual = UpdatePack<T, rule>(packs, first, job.params, job.active, &all_finite);
    if (!gathers) continue;
    bool any = false;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) any |= ReachesBar(residual.at[e], bar);
    if (!__any_sync(kWholeWarp, any)) continue;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const Candidate candidate{SignedKey(residual.at[e]), job.begin + first + e};
      collected.Add(ReachesBar(residual.at[e], bar), candidate, &job.candidates.state->gathered, write);
    }
  }
  if (gathers) collected.Flush(&job.candidates.state->gathered, kThreads, write);
  if (!all_finite) *job.finite = false;
}

unsigned BlocksOf(const AccumulateJob& job) {
  return BlocksFor(DivideUp(job.gradient.size, kWidth), kThreads * kRounds);
}

template <typename T, AccumulateRule rule>
cudaError_t LaunchKernel(const AccumulateGroup& group, cudaStream_t stream) {
  return Launch(accumulate_kernel<T, rule>, group.batch.blocks, kThreads, stream, group.batch);
}

}  // namespace

std::vector<AccumulateGroup> MakeGroups(const std::vector<AccumulateJob>& jobs, Tables* tables) {
  using Key = std::tuple<DType, AccumulateRule>;
  std::map<Key, std::vector<AccumulateJob>> groups;
  for (const AccumulateJob& job : jobs) {
    if (job.gradient.size > 0) groups[{job.gradient.dtype, job.params.rule}].push_back(job);
  }
  std::vector<AccumulateGroup> result;
  for (const auto& [key, members] : groups) {
    const auto& [dtype, rule] = key;
    std::vector<unsigned> blocks;
    for (const AccumulateJob& job : members) blocks.push_back(BlocksOf(job));
    result.push_back({dtype, rule, tables->AddBatch(members, blocks)});
  }
  return result;
}

cudaError_t accumulate_launch(const AccumulateGroup& group, cudaStream_t stream) {
  return Dispatch({nullptr, 0, group.dtype}, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    switch (group.rule) {
      case AccumulateRule::kMomentum: return LaunchKernel<T, AccumulateRule::kMomentum>(group, stream);
      case AccumulateRule::kNesterov: return LaunchKernel<T, AccumulateRule::kNesterov>(group, stream);
      case AccumulateRule::kResidual: break;
    }
    return LaunchKernel<T, AccumulateRule::kResidual>(group, stream);
  });
}

cudaError_t accumulate_launch(const AccumulateJob& job, cudaStream_t stream) {
  if (job.gradient.size == 0) return cudaSuccess;
  return accumulate_launch({job.gradient.dtype, job.params.rule, BatchOf(job, BlocksOf(job))}, stream);
}

namespace {

std::vector<AccumulateJob> JobsOf(const std::vector<Part>& parts, bool* finite) {
  std::vector<AccumulateJob> jobs;
  for (const Part& part : parts) {
    jobs.push_back(MakeAccumulateJob(part.gradient, part.params, part.feedback, finite + jobs.size()));
  }
  return jobs;
}

}  // namespace

int64_t accumulate_workspace_size(const std::vector<Part>& parts) {
  Tables tables(nullptr);
  MakeGroups(JobsOf(parts, nullptr), &tables);
  return tables.size();
}

cudaError_t accumulate_launch(const std::vector<Part>& parts, bool* finite, void* workspace, cudaStream_t stream) {
  if (parts.empty()) return cudaSuccess;
  Tables tables(workspace);
  const std::vector<AccumulateGroup> groups = MakeGroups(JobsOf(parts, finite), &tables);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(tables.Upload(stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(finite, 1, parts.size() * sizeof(bool), stream));
  for (const AccumulateGroup& group : groups) HVD_SPARSE_CUDA_RETURN_IF_ERROR(accumulate_launch(group, stream));
  return cudaSuccess;
}

}  // namespace hvd_sparse
