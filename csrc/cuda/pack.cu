#include "pack.h"

#include "../core/entries.h"
#include "../core/quantize.h"
#include "checksum.cuh"
#include "groups.cuh"

namespace hvd_sparse {

// checksum_kernel calls these functions.
__device__ inline const uint8_t* PayloadOf(const PackJob& job, int64_t /*row*/) { return job.payload; }
__device__ inline uint32_t* SumOf(const PackJob& job, int64_t /*row*/) { return &job.state->sum; }

__device__ inline GroupRow GroupRowOf(const PackJob& job, int64_t /*row*/) {
  return {job.indices, job.entries, job.slots};
}

namespace {

constexpr int kHeadWarps = 8;  // of a thread block: each counts the entries of a block of elements

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

// Writes the header and, for run lengths, the count of each block and the bitmap of full blocks. A warp counts the
// entries of a block of elements, and its thread block writes a byte of the bitmap.
__global__ void __launch_bounds__(kThreads) heads_kernel(Batch<PackJob> batch) {
  static_assert(kThreads == 32 * kHeadWarps && kHeadWarps == 8, "a warp a bit");
  __shared__ bool is_full[kHeadWarps];
  const Share<PackJob> share = ShareOf(batch);
  const DevicePlan& plan = share.job.plan;
  uint8_t* payload = share.job.payload;
  if (share.block == 0 && threadIdx.x == 0) *reinterpret_cast<Header*>(payload) = plan.header;
  if (plan.coding != Coding::kRunLength || share.job.entries == 0) return;
  const unsigned warp = threadIdx.x / 32;
  const unsigned half = threadIdx.x % 32 / 16;
  for (int64_t base = int64_t{share.block} * kHeadWarps; base < plan.blocks;
       base += int64_t{share.blocks} * kHeadWarps) {
    const int64_t block = base + warp;
    const int64_t below = CountBelowTogether<16>(share.job.indices, share.job.entries, (block + half) * kBlock);
    const auto before = static_cast<int64_t>(__shfl_sync(kWholeWarp, static_cast<Count>(below), 0));
    if (threadIdx.x % 32 == 31) {
      is_full[warp] = below - before == kBlock;
      if (block < plan.blocks) {
        StoreAs(payload, kPositionsAt + 2 * block, static_cast<uint16_t>(below - before));
      }
    }
    __syncthreads();
    if (plan.has_full && threadIdx.x == 0) {
      unsigned byte = 0;
      for (int w = 0; w < kHeadWarps; ++w) byte |= is_full[w] ? 1u << w : 0u;
      payload[plan.full_at + base / kHeadWarps] = static_cast<uint8_t>(byte);
    }
    __syncthreads();
  }
}

// Sets a bit of a section that was zero. Other threads may set bits of the same word.
__device__ void SetBit(uint8_t* payload, int64_t at, int64_t bit) {
  const int64_t byte = at + bit / 8;
  auto* word = reinterpret_cast<unsigned*>(payload + byte / 4 * 4);
  atomicOr(word, 1u << (8 * (byte % 4) + bit % 8));
}

__global__ void __launch_bounds__(kThreads) positions_kernel(Batch<PackJob> batch) {
  const Share<PackJob> share = ShareOf(batch);
  const DevicePlan& plan = share.job.plan;
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
  const DevicePlan& plan = share.job.plan;
  if (share.job.entries == 0) return;
  for (int64_t at = int64_t{share.block} * kThreads + threadIdx.x; at < plan.lower_bytes;
       at += int64_t{share.blocks} * kThreads) {
    share.job.payload[kPositionsAt + at] = LowBitsByte(share.job.indices, plan.k, plan.low, at);
  }
}

// Writes the values. This is a separate launch because a value may share a word with the last bits of the positions.
__global__ void __launch_bounds__(kThreads) values_kernel(Batch<PackJob> batch) {
  const Share<PackJob> share = ShareOf(batch);
  const DevicePlan& plan = share.job.plan;
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

// Finds the smallest and the largest magnitude of each group, which are its levels.
__global__ void __launch_bounds__(kThreads) extremes_kernel(Batch<PackJob> batch) {
  const Share<PackJob> share = ShareOf(batch);
  const PackJob& job = share.job;
  if (job.plan.code_bits == 0) return;
  const auto* values = static_cast<const float*>(job.values);
  for (int64_t j = int64_t{share.block} * kThreads + threadIdx.x; j < job.entries;
       j += int64_t{share.blocks} * kThreads) {
    const int64_t index = job.indices[j];
    if (index < 0 || index >= job.plan.n) continue;  // another kernel refuses this payload
    const int64_t slot = SlotOf(job.plan, job.slots, index);
    atomicMin(&job.least[slot], MagnitudeBits(values[j]));
    atomicMax(&job.largest[slot], MagnitudeBits(values[j]));
  }
}

// Returns a byte of codes. A code is the sign and, with two levels, whether the value has the larger one.
__device__ uint8_t CodesAt(const PackJob& job, int64_t byte) {
  const auto* values = static_cast<const float*>(job.values);
  const int each = 8 / job.plan.code_bits;
  uint32_t codes = 0;
  for (int e = 0; e < each; ++e) {
    const int64_t j = byte * each + e;
    if (j >= job.entries || job.indices[j] < 0 || job.indices[j] >= job.plan.n) continue;
    const int64_t slot = SlotOf(job.plan, job.slots, job.indices[j]);
    const uint32_t bits = MagnitudeBits(values[j]);
    const bool is_large = bits != job.least[slot];
    if (is_large && (job.plan.code_bits == 1 || bits != job.largest[slot])) job.state->refused = true;
    codes |= (FloatToBits(values[j]) >> 31 | (is_large ? 2u : 0u)) << (e * job.plan.code_bits);
  }
  return static_cast<uint8_t>(codes);
}

// Writes the levels and codes. If a group has more different magnitudes than levels, the payload is refused in the same
// way as for indices that do not ascend.
__global__ void __launch_bounds__(kThreads) low_bit_values_kernel(Batch<PackJob> batch) {
  const Share<PackJob> share = ShareOf(batch);
  const PackJob& job = share.job;
  if (job.plan.code_bits == 0 || job.entries == 0) return;
  const int64_t thread = int64_t{share.block} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{share.blocks} * kThreads;
  const int64_t slots = job.slots == nullptr ? 1 : job.slots[job.plan.groups];
  for (int64_t slot = thread; slot < slots; slot += threads) {
    const int64_t at = job.plan.values_at + 4 * job.plan.code_bits * slot;
    StoreAs(job.payload, at, job.least[slot]);
    if (job.plan.code_bits == 2) StoreAs(job.payload, at + 4, job.largest[slot]);
  }
  const int64_t bytes = (job.plan.code_bits * job.entries + 7) / 8;
  for (int64_t byte = thread; byte < bytes; byte += threads) {
    job.payload[job.plan.codes_at + byte] = CodesAt(job, byte);
  }
}

cudaError_t WriteLowBitValues(const Batch<PackJob>& batch, const PackWork& work, cudaStream_t stream) {
  if (work.level_count == 0) return cudaSuccess;
  const auto bytes = static_cast<size_t>(work.level_count) * sizeof(uint32_t);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(NumberGroups(batch, 1, work.slots, work.slot_count, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(work.least, 0xff, bytes, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(work.least + work.level_count, 0, bytes, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(extremes_kernel, batch.blocks, kThreads, stream, batch));
  return Launch(low_bit_values_kernel, batch.blocks, kThreads, stream, batch);
}

__global__ void seal_kernel(Batch<PackJob> batch) {
  const PackJob job = JobOfBlock(batch);
  const uint32_t checksum = job.plan.checksum_start ^ job.state->sum;
  StoreAs(job.payload, kChecksumAt, job.state->refused ? ~checksum : checksum);
}

}  // namespace

PackWork::PackWork(void* base, std::vector<PackJob>* jobs) {
  Workspace workspace(base);
  for (const PackJob& job : *jobs) {
    slot_count += SlotsFor(job.plan);
    if (job.plan.code_bits > 0) level_count += std::min(job.plan.k, job.plan.groups);
  }
  auto* states = workspace.Take<PackState>(static_cast<int64_t>(jobs->size()));
  slots = workspace.Take<uint32_t>(slot_count);
  least = workspace.Take<uint32_t>(2 * level_count);
  int64_t slots_before = 0;
  int64_t levels_before = 0;
  for (PackJob& job : *jobs) {
    job.state = states + blocks.size();
    job.slots = SlotsFor(job.plan) > 0 ? slots + slots_before : nullptr;
    job.least = least + levels_before;
    job.largest = job.least + level_count;
    slots_before += SlotsFor(job.plan);
    if (job.plan.code_bits > 0) levels_before += std::min(job.plan.k, job.plan.groups);
    const int64_t counted = job.plan.coding == Coding::kRunLength ? job.plan.blocks : 0;
    blocks.push_back(std::max(BlocksFor(job.plan.size, 8 * kThreads), BlocksFor(counted, kHeadWarps)));
  }
  size = workspace.used();
}

cudaError_t pack_launch(const Batch<PackJob>& batch, const PackWork& work, cudaStream_t stream) {
  for (auto* kernel : {zero_kernel, heads_kernel, low_bits_kernel, positions_kernel, values_kernel}) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(kernel, batch.blocks, kThreads, stream, batch));
  }
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(WriteLowBitValues(batch, work, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(LaunchChecksums(batch, 0, 1, stream));
  return Launch(seal_kernel, static_cast<unsigned>(batch.count), 1, stream, batch);
}

int64_t pack_workspace_size(const PayloadPlan& plan) {
  Tables tables(nullptr);
  std::vector<PackJob> jobs(1);
  jobs[0].plan = ForDevice(plan, &tables);
  return PackWork(nullptr, &jobs).size + tables.size();
}

cudaError_t pack_launch(const PayloadPlan& plan, const int64_t* indices, const void* values, int64_t entries,
                        uint8_t* payload, void* workspace, cudaStream_t stream) {
  std::vector<PackJob> jobs(1);
  jobs[0].plan = plan;
  jobs[0].indices = indices;
  jobs[0].values = values;
  jobs[0].entries = entries;
  jobs[0].payload = payload;
  const PackWork work(workspace, &jobs);
  Tables tables(static_cast<uint8_t*>(workspace) + work.size);
  jobs[0].plan = ForDevice(plan, &tables);
  jobs[0].plan.header.entries = static_cast<uint64_t>(entries);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(tables.Upload(stream));
  return pack_launch(BatchOf(jobs[0], work.blocks[0]), work, stream);
}

}  // namespace hvd_sparse
