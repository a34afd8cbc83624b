#include "pack.h"

#include "../core/entries.h"
#include "../core/quantize.h"
#include "checksum.cuh"

namespace hvd_sparse {

// For checksum_kernel.
__device__ inline const uint8_t* PayloadOf(const PackJob& job, int64_t /*row*/) { return job.payload; }
__device__ inline uint32_t* SumOf(const PackJob& job, int64_t /*row*/) { return &job.state->sum; }

namespace {

template <typename T>
__device__ void StoreAs(uint8_t* payload, int64_t at, T value) {  // `at` is a multiple of the item's size
  *reinterpret_cast<T*>(payload + at) = value;
}

__global__ void __launch_bounds__(kThreads) zero_kernel(Batch<PackJob> batch) {
  const Share<PackJob> share = ShareOf(batch);
  if (share.block == 0 && threadIdx.x == 0) *share.job.state = {};
  auto* words = reinterpret_cast<uint64_t*>(share.job.payload);
  for (int64_t i = int64_t{share.block} * kThreads + threadIdx.x; i < share.job.plan.size / 8;
       i += int64_t{share.blocks} * kThreads) {
    words[i] = 0;
  }
}

// The header; and for run lengths, the count of each block, and the bits that mark the full ones.
__global__ void __launch_bounds__(kThreads) heads_kernel(Batch<PackJob> batch) {
  const Share<PackJob> share = ShareOf(batch);
  const PayloadPlan& plan = share.job.plan;
  const int64_t* indices = share.job.indices;
  const int64_t entries = share.job.entries;
  uint8_t* payload = share.job.payload;
  if (share.block == 0 && threadIdx.x == 0) *reinterpret_cast<Header*>(payload) = plan.header;
  if (plan.coding != Coding::kRunLength || entries == 0) return;
  for (int64_t base = int64_t{share.block} * kThreads; base < plan.blocks; base += int64_t{share.blocks} * kThreads) {
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

__global__ void __launch_bounds__(kThreads) positions_kernel(Batch<PackJob> batch) {
  const Share<PackJob> share = ShareOf(batch);
  const PayloadPlan& plan = share.job.plan;
  const int64_t* indices = share.job.indices;
  const int64_t entries = share.job.entries;
  uint8_t* payload = share.job.payload;
  for (int64_t j = int64_t{share.block} * kThreads + threadIdx.x; j < entries; j += int64_t{share.blocks} * kThreads) {
    const int64_t index = indices[j];
    if (!Ascends(indices, j, plan.n)) share.job.state->refused = true;
    if (index < 0 || index >= plan.n) continue;
    switch (plan.coding) {
      case Coding::kRunLength: StoreAs(payload, plan.runs_at + 2 * j, RunBefore(indices, j)); break;
      case Coding::kEliasFano: SetBit(payload, plan.bits_at, (index >> plan.low) + j); break;
      case Coding::kBitmap: SetBit(payload, plan.bits_at, index); break;
      default: break;
    }
  }
}

__global__ void __launch_bounds__(kThreads) low_bits_kernel(Batch<PackJob> batch) {
  const Share<PackJob> share = ShareOf(batch);
  const PayloadPlan& plan = share.job.plan;
  if (share.job.entries == 0) return;
  for (int64_t at = int64_t{share.block} * kThreads + threadIdx.x; at < plan.lower_bytes;
       at += int64_t{share.blocks} * kThreads) {
    share.job.payload[kPositionsAt + at] = LowBitsByte(share.job.indices, plan.k, plan.low, at);
  }
}

// A launch of its own: a value may share a word with the last bits of the positions.
__global__ void __launch_bounds__(kThreads) values_kernel(Batch<PackJob> batch) {
  const Share<PackJob> share = ShareOf(batch);
  const PayloadPlan& plan = share.job.plan;
  const void* values = share.job.values;
  const int64_t entries = share.job.entries;
  uint8_t* payload = share.job.payload;
  const auto* wide = static_cast<const float*>(values);
  for (int64_t j = int64_t{share.block} * kThreads + threadIdx.x; j < entries; j += int64_t{share.blocks} * kThreads) {
    switch (plan.dtype) {
      case DType::kFloat32: StoreAs(payload, plan.values_at + 4 * j, wide[j]); break;
      case DType::kFloat64: StoreAs(payload, plan.values_at + 8 * j, static_cast<const double*>(values)[j]); break;
      case DType::kFloat16: StoreAs(payload, plan.values_at + 2 * j, ToFloat16(wide[j]).bits); break;
      case DType::kBFloat16: StoreAs(payload, plan.values_at + 2 * j, ToBFloat16(wide[j]).bits); break;
      default: break;
    }
  }
}

__global__ void seal_kernel(Batch<PackJob> batch) {
  const PackJob job = JobOfBlock(batch);
  const uint32_t checksum = job.plan.checksum_start ^ job.state->sum;
  StoreAs(job.payload, kChecksumAt, job.state->refused ? ~checksum : checksum);
}

}  // namespace

cudaError_t pack_launch(const Batch<PackJob>& batch, cudaStream_t stream) {
  for (auto* kernel : {zero_kernel, heads_kernel, low_bits_kernel, positions_kernel, values_kernel}) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(kernel, batch.blocks, kThreads, stream, batch));
  }
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(LaunchChecksums(batch, 0, 1, stream));
  return Launch(seal_kernel, static_cast<unsigned>(batch.count), 1, stream, batch);
}

int64_t pack_workspace_size() {
  Workspace workspace(nullptr);
  workspace.Take<PackState>(1);
  return workspace.used();
}

cudaError_t pack_launch(const PayloadPlan& plan, const int64_t* indices, const void* values, int64_t entries,
                        uint8_t* payload, void* workspace, cudaStream_t stream) {
  PackJob job{plan, indices, values, entries, payload, static_cast<PackState*>(workspace)};
  job.plan.header.entries = static_cast<uint64_t>(entries);
  return pack_launch(BatchOf(job, BlocksOf(job)), stream);
}

}  // namespace hvd_sparse
