#include "accumulate.h"

#include <map>
#include <tuple>

#include "batch.cuh"
#include "gather.cuh"

namespace hvd_sparse {
namespace {

constexpr int kWidth = 4;   // consecutive elements of a thread
constexpr int kRounds = 4;  // iterations of a block: enough to hide its start, few enough for a balanced end

// Elements that a thread reads or writes in one instruction.
template <typename T, int width>
struct alignas(sizeof(T) * width < 16 ? sizeof(T) * width : 16) Pack {
  T at[width];
};

// Elements at n and beyond count as zero.
template <int width, typename T>
__device__ Pack<T, width> Load(const T* data, int64_t first, int64_t n) {
  if (first + width <= n) return *reinterpret_cast<const Pack<T, width>*>(data + first);
  Pack<T, width> pack{};
  for (int e = 0; e < width; ++e) {
    if (first + e < n) pack.at[e] = data[first + e];
  }
  return pack;
}

template <typename T, int width>
__device__ void Store(const Pack<T, width>& pack, T* data, int64_t first, int64_t n) {
  if (first + width <= n) {
    *reinterpret_cast<Pack<T, width>*>(data + first) = pack;
    return;
  }
  for (int e = 0; e < width; ++e) {
    if (first + e < n) data[first + e] = pack.at[e];
  }
}

// Updates the pack at `first` and returns its residual.
template <typename T, AccumulateRule rule, int width>
__device__ Pack<float, width> UpdatePack(const T* gradient, int64_t first, int64_t n, const AccumulateParams& params,
                                         const Memory& memory, bool active, bool* finite) {
  const bool decays = params.weight_decay != 0 && params.parameter != nullptr;
  const Pack<T, width> incoming = Load<width>(gradient, first, n);
  Pack<float, width> residual = Load<width>(memory.residual, first, n);
  Pack<float, width> velocity{};
  Pack<float, width> parameter{};
  if constexpr (rule != AccumulateRule::kResidual) velocity = Load<width>(memory.velocity, first, n);
  if (decays) parameter = Load<width>(params.parameter, first, n);
#pragma unroll
  for (int e = 0; e < width; ++e) {
    const float local = Incoming(incoming.at[e], params.factor, parameter.at[e], params.weight_decay, decays, finite);
    if (active) *finite &= Update<rule>(local, params.momentum, &velocity.at[e], &residual.at[e]);
  }
  if (!active) return residual;
  if constexpr (rule != AccumulateRule::kResidual) Store(velocity, memory.velocity, first, n);
  Store(residual, memory.residual, first, n);
  return residual;
}

template <typename T, AccumulateRule rule, int width>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(Batch<AccumulateJob> batch) {
  __shared__ CollectedCandidates collected;
  const Share<AccumulateJob> share = ShareOf(batch);
  const AccumulateJob& job = share.job;
  const T* __restrict__ gradient = static_cast<const T*>(job.gradient.data);
  const int64_t n = job.gradient.size;
  const int64_t packs = (n + width - 1) / width;
  const bool gathers = job.candidates.state != nullptr;
  const uint64_t bar = gathers ? job.candidates.state->bar : 0;
  const WriteCandidate write{job.candidates};
  bool all_finite = true;
  if (gathers) collected.Begin();
  for (int64_t base = int64_t{share.block} * kThreads; base < packs; base += int64_t{share.blocks} * kThreads) {
    const int64_t first = (base + threadIdx.x) * width;
    Pack<float, width> residual{};
    if (first < n) {
      residual = UpdatePack<T, rule, width>(gradient, first, n, job.params, job.memory, job.active, &all_finite);
    }
    if (!gathers) continue;
    bool any = false;
#pragma unroll
    for (int e = 0; e < width; ++e) any |= ReachesBar(residual.at[e], bar);
    if (!__any_sync(kWholeWarp, any)) continue;
#pragma unroll
    for (int e = 0; e < width; ++e) {
      const Candidate candidate{SelectionKey(residual.at[e]), job.begin + first + e};
      collected.Add(ReachesBar(residual.at[e], bar), candidate, &job.candidates.state->gathered, write);
    }
  }
  if (gathers) collected.Flush(&job.candidates.state->gathered, kThreads, write);
  if (!all_finite) *job.finite = false;
}

// Returns whether packs of elements of `size` bytes can be read from this address.
bool IsAligned(const void* data, int64_t size) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(std::min<int64_t>(16, size * kWidth)) == 0;
}

bool IsWide(const AccumulateJob& job) {
  const int64_t size = ItemSize(job.gradient.dtype);
  return IsAligned(job.gradient.data, size) && IsAligned(job.memory.residual, sizeof(float)) &&
         IsAligned(job.memory.velocity, sizeof(float)) && IsAligned(job.params.parameter, sizeof(float));
}

unsigned BlocksOf(const AccumulateJob& job, bool is_wide) {
  return BlocksFor(DivideUp(job.gradient.size, is_wide ? kWidth : 1), kThreads * kRounds);
}

template <typename T, AccumulateRule rule>
cudaError_t AccumulateByWidth(const AccumulateGroup& group, cudaStream_t stream) {
  const auto launch = [&](auto kernel) { return Launch(kernel, group.batch.blocks, kThreads, stream, group.batch); };
  return group.is_wide ? launch(accumulate_kernel<T, rule, kWidth>) : launch(accumulate_kernel<T, rule, 1>);
}

}  // namespace

std::vector<AccumulateGroup> MakeGroups(const std::vector<AccumulateJob>& jobs, Tables* tables) {
  using Key = std::tuple<DType, AccumulateRule, bool>;
  std::map<Key, std::vector<AccumulateJob>> groups;
  for (const AccumulateJob& job : jobs) {
    if (job.gradient.size > 0) groups[{job.gradient.dtype, job.params.rule, IsWide(job)}].push_back(job);
  }
  std::vector<AccumulateGroup> result;
  for (const auto& [key, members] : groups) {
    const auto& [dtype, rule, is_wide] = key;
    std::vector<unsigned> blocks;
    for (const AccumulateJob& job : members) blocks.push_back(BlocksOf(job, is_wide));
    result.push_back({dtype, rule, is_wide, tables->AddBatch(members, blocks)});
  }
  return result;
}

cudaError_t accumulate_launch(const AccumulateGroup& group, cudaStream_t stream) {
  return Dispatch({nullptr, 0, group.dtype}, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    switch (group.rule) {
      case AccumulateRule::kMomentum: return AccumulateByWidth<T, AccumulateRule::kMomentum>(group, stream);
      case AccumulateRule::kNesterov: return AccumulateByWidth<T, AccumulateRule::kNesterov>(group, stream);
      case AccumulateRule::kResidual: break;
    }
    return AccumulateByWidth<T, AccumulateRule::kResidual>(group, stream);
  });
}

cudaError_t accumulate_launch(const AccumulateJob& job, cudaStream_t stream) {
  if (job.gradient.size == 0) return cudaSuccess;
  const bool is_wide = IsWide(job);
  return accumulate_launch({job.gradient.dtype, job.params.rule, is_wide, BatchOf(job, BlocksOf(job, is_wide))},
                           stream);
}

}  // namespace hvd_sparse
