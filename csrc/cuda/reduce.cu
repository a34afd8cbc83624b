#include "reduce.h"

#include "../core/entries.h"

namespace hvd_sparse {
namespace {

constexpr int kAddThreads = 128;
constexpr int kRanksAtOnce = kAddThreads / 2;
constexpr int64_t kMostBytes = int64_t{256} << 20;  // of a workspace, where one rank's need not be more

__device__ float FloatAt(const PayloadPlan& plan, const uint8_t* payload, int64_t j) {
  const auto read = [&](int size) { return ReadBytes(payload, plan.size, plan.values_at + size * j, size); };
  switch (plan.dtype) {
    case DType::kFloat64: return static_cast<float>(__longlong_as_double(static_cast<long long>(read(8))));
    case DType::kFloat16: return ToFloat(Float16{static_cast<uint16_t>(read(2))});
    case DType::kBFloat16: return ToFloat(BFloat16{static_cast<uint16_t>(read(2))});
    case DType::kNone: return 0.0f;
    default: break;
  }
  return BitsToFloat(static_cast<uint32_t>(read(4)));
}

__device__ int64_t IndexAt(const DecodeWork& work, const PayloadPlan& plan, int64_t row, int64_t j) {
  return work.indices == nullptr ? j : work.indices[row * plan.k + j];
}

// How many entries of a payload are below an element.
__device__ int64_t EntriesBelow(const DecodeWork& work, const PayloadPlan& plan, int64_t row, int64_t element) {
  const int64_t entries = work.entries[row];
  if (work.indices == nullptr) return element < entries ? element : entries;
  return CountBelow(work.indices + row * plan.k, entries, element);
}

// A thread block owns a block of elements, and adds one rank after the other to it: of each, an element gets one entry
// at most, and the barrier between ranks keeps their order.
__global__ void __launch_bounds__(kAddThreads)
    add_kernel(PayloadPlan plan, Payloads payloads, DecodeWork work, float scale, float* out) {
  __shared__ int64_t bounds[kRanksAtOnce][2];
  if (*work.failure != kNoFailure) return;
  for (int64_t block = blockIdx.x; block < plan.blocks; block += gridDim.x) {
    for (int64_t group = 0; group < payloads.count; group += kRanksAtOnce) {
      const int64_t rank = group + threadIdx.x / 2;
      const unsigned side = threadIdx.x % 2;
      if (rank < payloads.count) {
        bounds[threadIdx.x / 2][side] = EntriesBelow(work, plan, rank, (block + side) * kBlock);
      }
      __syncthreads();
      const int64_t ranks = payloads.count - group < kRanksAtOnce ? payloads.count - group : kRanksAtOnce;
      for (int64_t r = 0; r < ranks; ++r) {
        const uint8_t* payload = payloads.data + (group + r) * payloads.stride;
        for (int64_t j = bounds[r][0] + threadIdx.x; j < bounds[r][1]; j += kAddThreads) {
          const int64_t index = IndexAt(work, plan, group + r, j);
          if (index >= 0 && index < plan.n) out[index] += scale * FloatAt(plan, payload, j);
        }
        __syncthreads();
      }
    }
  }
}

__device__ void Record(uint32_t failure, DecodeStatus* status) {
  if (status->refused == 0) status->first = failure;
  ++status->refused;
}

__global__ void __launch_bounds__(kThreads)
    finish_reduce_kernel(const uint32_t* failure, int64_t n, float* out, DecodeStatus* status) {
  if (*failure == kNoFailure) return;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += int64_t{gridDim.x} * kThreads) {
    out[i] = BitsToFloat(0x7fc00000u);  // NaN
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) Record(*failure, status);
}

__global__ void __launch_bounds__(kThreads) clear_kernel(PayloadPlan plan, const uint8_t* payload, DecodeWork work,
                                                         float* residual, float* velocity, DecodeStatus* status) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (*work.failure != kNoFailure) {
    if (first == 0) Record(*work.failure, status);
    return;
  }
  const int64_t entries = *work.entries;
  for (int64_t j = first; j < entries; j += int64_t{gridDim.x} * kThreads) {
    const int64_t index = IndexAt(work, plan, 0, j);
    if (index < 0 || index >= plan.n) continue;
    residual[index] = plan.dtype == DType::kFloat32 ? 0.0f : residual[index] - FloatAt(plan, payload, j);
    if (velocity != nullptr) velocity[index] = 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads) unpack_kernel(PayloadPlan plan, const uint8_t* payload, DecodeWork work,
                                                          int64_t* report, int64_t* indices, void* values) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t entries = *work.entries;
  if (first == 0) {
    report[0] = *work.failure;
    report[1] = entries;
  }
  if (*work.failure != kNoFailure) return;
  for (int64_t j = first; j < entries; j += int64_t{gridDim.x} * kThreads) {
    indices[j] = IndexAt(work, plan, 0, j);
    if (plan.dtype == DType::kFloat64) {
      const uint64_t bits = ReadBytes(payload, plan.size, plan.values_at + 8 * j, 8);
      static_cast<double*>(values)[j] = __longlong_as_double(static_cast<long long>(bits));
    } else {
      static_cast<float*>(values)[j] = FloatAt(plan, payload, j);
    }
  }
}

// How many ranks are decoded before they are added: all, if that does not take too much memory.
int64_t RanksTogether(const PayloadPlan& plan, int64_t ranks) {
  const int64_t each = DecodeWork(nullptr, plan, 1).size;
  return std::clamp<int64_t>(kMostBytes / each, 1, std::clamp<int64_t>(ranks, 1, kLargestGridHeight));
}

}  // namespace

int64_t reduce_payloads_workspace_size(const PayloadPlan& plan, int64_t ranks) {
  return DecodeWork(nullptr, plan, RanksTogether(plan, ranks)).size;
}

cudaError_t reduce_payloads_launch(const PayloadPlan& plan, const uint8_t* gathered, int64_t ranks, int64_t stride,
                                   float scale, float* out, DecodeStatus* status, void* workspace,
                                   cudaStream_t stream) {
  const int64_t together = RanksTogether(plan, ranks);
  const DecodeWork work(workspace, plan, together);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(begin_decode_launch(work, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(out, 0, static_cast<size_t>(plan.n) * sizeof(float), stream));
  for (int64_t first = 0; first < ranks; first += together) {
    const Payloads payloads{gathered + first * stride, stride, first, std::min(together, ranks - first)};
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(decode_launch(plan, payloads, work, stream));
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(
        Launch(add_kernel, BlocksFor(plan.blocks, 1), kAddThreads, stream, plan, payloads, work, scale, out));
  }
  unsigned blocks = 0;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(BusyBlocksFor(plan.n, kThreads, &blocks));
  return Launch(finish_reduce_kernel, blocks, kThreads, stream, work.failure, plan.n, out, status);
}

int64_t unpack_workspace_size(const PayloadPlan& plan) { return DecodeWork(nullptr, plan, 1).size; }

cudaError_t clear_launch(const PayloadPlan& plan, const uint8_t* payload, float* residual, float* velocity,
                         DecodeStatus* status, void* workspace, cudaStream_t stream) {
  const DecodeWork work(workspace, plan, 1);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(begin_decode_launch(work, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(decode_launch(plan, {payload, 0, 0, 1}, work, stream));
  return Launch(clear_kernel, BlocksFor(plan.k), kThreads, stream, plan, payload, work, residual, velocity, status);
}

cudaError_t unpack_launch(const PayloadPlan& plan, const uint8_t* payload, int64_t* report, int64_t* indices,
                          void* values, void* workspace, cudaStream_t stream) {
  const DecodeWork work(workspace, plan, 1);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(begin_decode_launch(work, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(decode_launch(plan, {payload, 0, 0, 1}, work, stream));
  return Launch(unpack_kernel, BlocksFor(plan.k), kThreads, stream, plan, payload, work, report, indices, values);
}

}  // namespace hvd_sparse
