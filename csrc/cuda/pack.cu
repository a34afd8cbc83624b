#include "pack.h"

#include "../core/entries.h"
#include "../core/quantize.h"
#include "checksum.h"
#include "warp.cuh"

namespace hvd_sparse {
namespace {

struct PackState {
  uint32_t sum;  // what the bytes leave as a remainder
  bool refused;  // the indices do not ascend in [0, n)
};

template <typename T>
__device__ void StoreAs(uint8_t* payload, int64_t at, T value) {  // `at` is a multiple of the item's size
  *reinterpret_cast<T*>(payload + at) = value;
}

// The header; and for run lengths, the count of each block, and the bits that mark the full ones.
__global__ void __launch_bounds__(kThreads)
    heads_kernel(PayloadPlan plan, const int64_t* indices, int64_t entries, uint8_t* payload) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *reinterpret_cast<Header*>(payload) = plan.header;
  if (plan.coding != Coding::kRunLength || entries == 0) return;
  for (int64_t base = int64_t{blockIdx.x} * kThreads; base < plan.blocks; base += int64_t{gridDim.x} * kThreads) {
    const int64_t block = base + threadIdx.x;
    const bool is_there = block < plan.blocks;
    int64_t count = 0;
    if (is_there) {
      count = CountBelow(indices, entries, (block + 1) * kBlock) - CountBelow(indices, entries, block * kBlock);
      StoreAs(payload, kPositionsAt + 2 * block, static_cast<uint16_t>(count));
    }
    const unsigned full = __ballot_sync(kWholeWarp, count == kBlock);
    const unsigned lane = threadIdx.x % 32;
    if (plan.has_full && is_there && lane % 8 == 0) {
      payload[plan.full_at + block / 8] = static_cast<uint8_t>(full >> lane);
    }
  }
}

// Sets a bit of a section whose bytes are zero; other threads may set others of the same word.
__device__ void SetBit(uint8_t* payload, int64_t at, int64_t bit) {
  const int64_t byte = at + bit / 8;
  auto* word = reinterpret_cast<unsigned*>(payload + byte / 4 * 4);
  atomicOr(word, 1u << (8 * (byte % 4) + bit % 8));
}

__global__ void __launch_bounds__(kThreads)
    positions_kernel(PayloadPlan plan, const int64_t* indices, int64_t entries, uint8_t* payload, PackState* state) {
  for (int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x; j < entries; j += int64_t{gridDim.x} * kThreads) {
    const int64_t index = indices[j];
    if (!Ascends(indices, j, plan.n)) state->refused = true;
    if (index < 0 || index >= plan.n) continue;
    switch (plan.coding) {
      case Coding::kRunLength: StoreAs(payload, plan.runs_at + 2 * j, RunBefore(indices, j)); break;
      case Coding::kEliasFano: SetBit(payload, plan.bits_at, (index >> plan.low) + j); break;
      case Coding::kBitmap: SetBit(payload, plan.bits_at, index); break;
      default: break;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    low_bits_kernel(PayloadPlan plan, const int64_t* indices, uint8_t* payload) {
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < plan.lower_bytes;
       at += int64_t{gridDim.x} * kThreads) {
    payload[kPositionsAt + at] = LowBitsByte(indices, plan.k, plan.low, at);
  }
}

// A launch of its own: a value may share a word with the last bits of the positions.
__global__ void __launch_bounds__(kThreads)
    values_kernel(PayloadPlan plan, const void* values, int64_t entries, uint8_t* payload) {
  const auto* wide = static_cast<const float*>(values);
  for (int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x; j < entries; j += int64_t{gridDim.x} * kThreads) {
    switch (plan.dtype) {
      case DType::kFloat32: StoreAs(payload, plan.values_at + 4 * j, wide[j]); break;
      case DType::kFloat64: StoreAs(payload, plan.values_at + 8 * j, static_cast<const double*>(values)[j]); break;
      case DType::kFloat16: StoreAs(payload, plan.values_at + 2 * j, ToFloat16(wide[j]).bits); break;
      case DType::kBFloat16: StoreAs(payload, plan.values_at + 2 * j, ToBFloat16(wide[j]).bits); break;
      default: break;
    }
  }
}

__global__ void seal_kernel(const PackState* state, uint32_t start, uint8_t* payload) {
  const uint32_t checksum = start ^ state->sum;
  StoreAs(payload, kChecksumAt, state->refused ? ~checksum : checksum);
}

cudaError_t WriteEntries(const PayloadPlan& plan, const int64_t* indices, const void* values, uint8_t* payload,
                         PackState* state, cudaStream_t stream) {
  if (plan.lower_bytes > 0) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(
        Launch(low_bits_kernel, BlocksFor(plan.lower_bytes), kThreads, stream, plan, indices, payload));
  }
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(
      Launch(positions_kernel, BlocksFor(plan.k), kThreads, stream, plan, indices, plan.k, payload, state));
  if (plan.dtype == DType::kNone) return cudaSuccess;
  return Launch(values_kernel, BlocksFor(plan.k), kThreads, stream, plan, values, plan.k, payload);
}

}  // namespace

int64_t pack_workspace_size() {
  Workspace workspace(nullptr);
  workspace.Take<PackState>(1);
  return workspace.used();
}

cudaError_t pack_launch(const PayloadPlan& plan, const int64_t* indices, const void* values, int64_t entries,
                        uint8_t* payload, void* workspace, cudaStream_t stream) {
  auto* state = static_cast<PackState*>(workspace);
  PayloadPlan written = plan;
  written.header.entries = static_cast<uint64_t>(entries);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(state, 0, sizeof(PackState), stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(payload, 0, static_cast<size_t>(plan.size), stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(
      Launch(heads_kernel, BlocksFor(plan.blocks), kThreads, stream, written, indices, entries, payload));
  if (entries > 0) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(WriteEntries(written, indices, values, payload, state, stream));
  }
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(checksum_launch(payload, 0, 1, plan.size, &state->sum, stream));
  return Launch(seal_kernel, 1, 1, stream, state, plan.checksum_start, payload);
}

}  // namespace hvd_sparse
