#include "accumulate.h"

#include "gather.cuh"

namespace hvd_sparse {
namespace {

constexpr int kWidth = 4;   // elements of a thread that lie together
constexpr int kRounds = 4;  // of a block: enough to hide its start, few enough to keep the grid's tail short

// Elements that are read or written at once.
template <typename T, int width>
struct alignas(sizeof(T) * width < 16 ? sizeof(T) * width : 16) Pack {
  T at[width];
};

// What lies behind n counts as zero.
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

// Updates the pack at `first`; returns its residual.
template <typename T, AccumulateRule rule, int width>
__device__ Pack<float, width> UpdatePack(const T* gradient, int64_t first, int64_t n, const AccumulateParams& params,
                                         const Memory& memory, bool* finite) {
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
    Update<rule>(local, params.momentum, &velocity.at[e], &residual.at[e]);
  }
  if constexpr (rule != AccumulateRule::kResidual) Store(velocity, memory.velocity, first, n);
  Store(residual, memory.residual, first, n);
  return residual;
}

template <typename T, AccumulateRule rule, int width>
__global__ void __launch_bounds__(kThreads)
    accumulate_kernel(const T* __restrict__ gradient, int64_t n, AccumulateParams params, Memory memory, bool* finite,
                      Candidates candidates) {
  const int64_t packs = (n + width - 1) / width;
  const bool gathers = candidates.state != nullptr;
  const uint64_t bar = gathers ? candidates.state->bar : 0;
  bool all_finite = true;
  for (int64_t base = int64_t{blockIdx.x} * kThreads; base < packs; base += int64_t{gridDim.x} * kThreads) {
    const int64_t first = (base + threadIdx.x) * width;
    Pack<float, width> residual{};
    if (first < n) residual = UpdatePack<T, rule, width>(gradient, first, n, params, memory, &all_finite);
    if (!gathers) continue;
    bool any = false;
#pragma unroll
    for (int e = 0; e < width; ++e) any |= ReachesBar(residual.at[e], bar);
    if (!__any_sync(kWholeWarp, any)) continue;
#pragma unroll
    for (int e = 0; e < width; ++e) Offer(residual.at[e], first + e, bar, candidates);
  }
  if (!all_finite) *finite = false;
}

// Whether packs of elements of `size` bytes may be read from there.
bool IsAligned(const void* data, int64_t size) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(std::min<int64_t>(16, size * kWidth)) == 0;
}

template <typename T, AccumulateRule rule>
cudaError_t AccumulateByWidth(const T* gradient, int64_t n, const AccumulateParams& params, Memory memory, bool* finite,
                              const Candidates& candidates, cudaStream_t stream) {
  const bool is_aligned = IsAligned(gradient, sizeof(T)) && IsAligned(memory.residual, sizeof(float)) &&
                          IsAligned(memory.velocity, sizeof(float)) && IsAligned(params.parameter, sizeof(float));
  const int width = is_aligned ? kWidth : 1;
  const unsigned blocks = BlocksFor(DivideUp(n, width), kThreads * kRounds);
  if (is_aligned) {
    return Launch(accumulate_kernel<T, rule, kWidth>, blocks, kThreads, stream, gradient, n, params, memory, finite,
                  candidates);
  }
  return Launch(accumulate_kernel<T, rule, 1>, blocks, kThreads, stream, gradient, n, params, memory, finite,
                candidates);
}

}  // namespace

cudaError_t accumulate_launch(const Array& gradient, const AccumulateParams& params, Memory memory, bool* finite,
                              const Candidates& candidates, cudaStream_t stream) {
  if (gradient.size == 0) return cudaSuccess;
  return Dispatch(gradient, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    const auto arguments = [&](auto launcher) {
      return launcher(data, gradient.size, params, memory, finite, candidates, stream);
    };
    switch (params.rule) {
      case AccumulateRule::kMomentum: return arguments(AccumulateByWidth<T, AccumulateRule::kMomentum>);
      case AccumulateRule::kNesterov: return arguments(AccumulateByWidth<T, AccumulateRule::kNesterov>);
      case AccumulateRule::kResidual: break;
    }
    return arguments(AccumulateByWidth<T, AccumulateRule::kResidual>);
  });
}

}  // namespace hvd_sparse
