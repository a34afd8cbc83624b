#include "low_bit.h"

#include "groups.cuh"
#include "sort.h"

namespace hvd_sparse {

__device__ inline GroupRow GroupRowOf(const LowBitJob& job, int64_t /*row*/) {
  return {job.indices, job.plan.k, job.slots};
}

namespace {

constexpr int kAhead = 16;  // values that a thread reads before it adds the first: they are added one after the other
constexpr int kChunksAhead = 4;

__global__ void __launch_bounds__(kThreads) group_keys_kernel(Batch<LowBitJob> batch) {
  const Share<LowBitJob> share = ShareOf(batch);
  const LowBitJob& job = share.job;
  for (int64_t j = int64_t{share.block} * kThreads + threadIdx.x; j < job.plan.k;
       j += int64_t{share.blocks} * kThreads) {
    const int64_t group = job.slots == nullptr ? 0 : GroupOf(job.plan, job.indices[j]);
    job.keys[j] = job.tag | static_cast<uint64_t>(group) << job.bits | static_cast<uint64_t>(j);
  }
}

__device__ int64_t EntryAt(const LowBitJob& job, int64_t place) {
  if (job.slots == nullptr) return place;  // there is one group
  return static_cast<int64_t>(job.sorted[place] & ((uint64_t{1} << job.bits) - 1));
}

__device__ int64_t GroupAt(const LowBitJob& job, int64_t place) {
  return static_cast<int64_t>((job.sorted[place] ^ job.tag) >> job.bits);
}

// Finds the first entry of each group.
__global__ void __launch_bounds__(kThreads) group_starts_kernel(Batch<LowBitJob> batch) {
  const Share<LowBitJob> share = ShareOf(batch);
  const LowBitJob& job = share.job;
  for (int64_t place = int64_t{share.block} * kThreads + threadIdx.x; place < job.plan.k;
       place += int64_t{share.blocks} * kThreads) {
    const int64_t group = GroupAt(job, place);
    if (place > 0 && GroupAt(job, place - 1) == group) continue;
    job.starts[job.slots == nullptr ? 0 : job.slots[group]] = place;
  }
}

__device__ int64_t SlotsOf(const LowBitJob& job) { return job.slots == nullptr ? 1 : job.slots[job.plan.groups]; }

// The sorted entries [begin, end) of a group.
struct Entries {
  int64_t begin;
  int64_t end;
};

__device__ Entries EntriesOf(const LowBitJob& job, int64_t slots, int64_t slot) {
  return {job.starts[slot], slot + 1 < slots ? job.starts[slot + 1] : job.plan.k};
}

// Returns the place of a group's first chunk. A group has fewer chunks than there are places before the next group's.
__device__ int64_t ChunksBefore(const LowBitJob& job, int64_t slot) { return job.starts[slot] / kLevelChunk + slot; }

// Returns the largest number of places for chunks.
int64_t MostChunks(int64_t k, int64_t slots) { return k / kLevelChunk + slots + 1; }

// Adds the magnitudes of each chunk, one thread for each: all in one class, or those from the group's split in another.
template <bool kSplits>
__global__ void __launch_bounds__(kThreads) add_chunks_kernel(Batch<LowBitJob> batch) {
  const Share<LowBitJob> share = ShareOf(batch);
  const LowBitJob& job = share.job;
  if (!kSplits && job.plan.code_bits == 1) return;
  const int64_t slots = SlotsOf(job);
  if (slots == 0) return;  // no index is in range
  const int64_t chunks = ChunksBefore(job, slots - 1) + job.plan.k / kLevelChunk + 1;
  for (int64_t chunk = int64_t{share.block} * kThreads + threadIdx.x; chunk < chunks;
       chunk += int64_t{share.blocks} * kThreads) {
    const int64_t slot = LastFrom(slots, chunk, [&](int64_t i) { return ChunksBefore(job, i); });
    const Entries entries = EntriesOf(job, slots, slot);
    const int64_t begin = entries.begin + (chunk - ChunksBefore(job, slot)) * kLevelChunk;
    const int64_t end = begin + kLevelChunk < entries.end ? begin + kLevelChunk : entries.end;
    if (begin >= end) continue;
    const bool has_split = kSplits && job.plan.code_bits == 2;
    const double split = has_split ? job.splits[slot] : 0;
    MagnitudeClass small;
    MagnitudeClass large;
    for (int64_t place = begin; place < end; place += kAhead) {
      uint32_t bits[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        bits[a] = place + a < end ? MagnitudeBits(job.values[EntryAt(job, place + a)]) : 0;  // zeros are not added
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        (has_split && MagnitudeFromBits(float{}, bits[a]) >= split ? large : small).Add(bits[a]);
      }
    }
    job.chunks[2 * chunk] = small;
    job.chunks[2 * chunk + 1] = large;
  }
}

// Adds the chunks of each group: their mean is the group's split, or their classes have the levels.
template <bool kSplits>
__global__ void __launch_bounds__(kThreads) levels_kernel(Batch<LowBitJob> batch) {
  const Share<LowBitJob> share = ShareOf(batch);
  const LowBitJob& job = share.job;
  if (!kSplits && job.plan.code_bits == 1) return;
  const int64_t slots = SlotsOf(job);
  for (int64_t slot = int64_t{share.block} * kThreads + threadIdx.x; slot < slots;
       slot += int64_t{share.blocks} * kThreads) {
    const Entries entries = EntriesOf(job, slots, slot);
    const MagnitudeClass* chunks = job.chunks + 2 * ChunksBefore(job, slot);
    MagnitudeClass small;
    MagnitudeClass large;
    const int64_t count = (entries.end - entries.begin + kLevelChunk - 1) / kLevelChunk;
    for (int64_t chunk = 0; chunk < count; chunk += kChunksAhead) {
      MagnitudeClass ahead[2 * kChunksAhead];
#pragma unroll
      for (int a = 0; a < 2 * kChunksAhead; ++a) {
        if (chunk + a / 2 < count) ahead[a] = chunks[2 * chunk + a];
      }
#pragma unroll
      for (int a = 0; a < 2 * kChunksAhead; ++a) (a % 2 == 0 ? small : large).Add(ahead[a]);
    }
    if (!kSplits) {
      job.splits[slot] = small.Mean();
      continue;
    }
    job.levels[2 * slot] = small.Of(job.level);
    job.levels[2 * slot + 1] = large.Of(job.level);
  }
}

__global__ void __launch_bounds__(kThreads) to_levels_kernel(Batch<LowBitJob> batch) {
  const Share<LowBitJob> share = ShareOf(batch);
  const LowBitJob& job = share.job;
  for (int64_t j = int64_t{share.block} * kThreads + threadIdx.x; j < job.plan.k;
       j += int64_t{share.blocks} * kThreads) {
    const int64_t slot = job.slots == nullptr ? 0 : SlotOf(job.plan, job.slots, job.indices[j]);
    const float value = job.values[j];
    const double magnitude = MagnitudeFromBits(float{}, MagnitudeBits(value));
    const bool is_large = job.plan.code_bits == 2 && magnitude >= job.splits[slot];
    job.values[j] = WithSignOf(value, job.levels[2 * slot + (is_large ? 1 : 0)]);
  }
}

}  // namespace

LowBitWork::LowBitWork(void* base, std::vector<LowBitJob>* jobs) {
  Workspace workspace(base);
  int64_t groups = 1;
  int64_t entries = 1;
  for (const LowBitJob& job : *jobs) {
    slot_count += SlotsFor(job.plan);
    total += job.plan.k;
    groups = std::max(groups, job.plan.groups);
    entries = std::max(entries, job.plan.k);
  }
  const int bits = BitsBelow(entries);
  const int group_bits = groups > 1 ? BitsBelow(groups) : 0;
  sort_bits = bits + group_bits + (jobs->size() > 1 ? BitsBelow(static_cast<int64_t>(jobs->size())) : 0);
  slots = workspace.Take<uint32_t>(slot_count);
  keys = workspace.Take<uint64_t>(total);
  sorted = workspace.Take<uint64_t>(total);
  int64_t slots_before = 0;
  int64_t before = 0;
  for (LowBitJob& job : *jobs) {
    const int64_t levels = std::min(job.plan.k, job.plan.groups);
    job.bits = bits;
    job.tag = jobs->size() > 1 ? static_cast<uint64_t>(blocks.size()) << (bits + group_bits) : 0;
    job.keys = keys + before;
    job.sorted = (slot_count > 0 ? sorted : keys) + before;  // if each job has one group, the keys already ascend
    job.slots = SlotsFor(job.plan) > 0 ? slots + slots_before : nullptr;
    job.starts = workspace.Take<int64_t>(levels);
    job.chunks = workspace.Take<MagnitudeClass>(2 * MostChunks(job.plan.k, levels));
    job.splits = workspace.Take<double>(levels);
    job.levels = workspace.Take<float>(2 * levels);
    slots_before += SlotsFor(job.plan);
    before += job.plan.k;
    blocks.push_back(BlocksFor(job.plan.k));
  }
  status = cudaSuccess;
  if (slot_count > 0) {
    status = sort_bits > 63 ? cudaErrorInvalidValue : sort_numbers_workspace_size(total, {0, sort_bits}, &sort_size);
  }
  sort = workspace.Take<uint8_t>(static_cast<int64_t>(sort_size));
  size = workspace.used();
}

cudaError_t quantize_low_bit_launch(const Batch<LowBitJob>& batch, const LowBitWork& work, cudaStream_t stream) {
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.status);
  const auto launch = [&](auto kernel) { return Launch(kernel, batch.blocks, kThreads, stream, batch); };
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(NumberGroups(batch, 1, work.slots, work.slot_count, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(launch(group_keys_kernel));
  if (work.slot_count > 0) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(sort_numbers_launch(work.keys, work.total, {0, work.sort_bits}, work.sort,
                                                        work.sort_size, work.sorted, stream));
  }
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(launch(group_starts_kernel));
  for (auto* kernel : {add_chunks_kernel<false>, levels_kernel<false>, add_chunks_kernel<true>, levels_kernel<true>}) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(launch(kernel));
  }
  return launch(to_levels_kernel);
}

cudaError_t quantize_low_bit_workspace_size(const PayloadPlan& plan, int64_t* size) {
  *size = 0;
  Tables tables(nullptr);
  std::vector<LowBitJob> jobs(1);
  jobs[0].plan = ForDevice(plan, &tables);
  const LowBitWork work(nullptr, &jobs);
  *size = work.size + tables.size();
  return work.status;
}

cudaError_t quantize_low_bit_launch(const PayloadPlan& plan, Level level, const int64_t* indices, float* values,
                                    void* workspace, cudaStream_t stream) {
  if (plan.k == 0) return cudaSuccess;
  std::vector<LowBitJob> jobs(1);
  jobs[0].plan = plan;
  jobs[0].level = level;
  jobs[0].indices = indices;
  jobs[0].values = values;
  const LowBitWork work(workspace, &jobs);
  Tables tables(static_cast<uint8_t*>(workspace) + work.size);
  jobs[0].plan = ForDevice(plan, &tables);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(tables.Upload(stream));
  return quantize_low_bit_launch(BatchOf(jobs[0], work.blocks[0]), work, stream);
}

}  // namespace hvd_sparse
