#include "decode.h"

#include <cub/block/block_scan.cuh>

#include "checksum.cuh"
#include "groups.cuh"

namespace hvd_sparse {

// checksum_kernel calls these functions.
__device__ inline const uint8_t* PayloadOf(const DecodeJob& job, int64_t rank) { return job.data + rank * job.stride; }
__device__ inline uint32_t* SumOf(const DecodeJob& job, int64_t row) { return job.rows.sums + row; }

__device__ inline GroupRow GroupRowOf(const DecodeJob& job, int64_t row) {
  const int64_t* indices = job.rows.indices == nullptr ? nullptr : job.rows.indices + row * job.plan.k;
  uint32_t* slots = job.rows.slots == nullptr ? nullptr : job.rows.slots + row * (job.plan.groups + 1);
  return {indices, job.rows.entries[row], slots};
}

namespace {

constexpr int kRunThreads = 128;
constexpr int kScanThreads = 1024;
constexpr int kFewScanThreads = 64;  // for payloads of few tiles
constexpr int kWords = 4;            // 32-bit words per thread
constexpr int64_t kTileBits = int64_t{32} * kWords * kThreads;

// One of the payloads of a grid. Each payload is a row of the grid.
struct Row {
  __device__ Row(const DecodeJob& job, int64_t first, int64_t row)
      : rank(static_cast<uint32_t>(job.rank + first + row)),
        payload(job.data + (first + row) * job.stride),
        failure(job.rows.failure),
        sum(job.rows.sums + row),
        entries(job.rows.entries + row),
        counts(job.rows.counts + row * job.rows.tiles),
        starts(job.rows.starts + row * (job.rows.tiles + 1)),
        indices(job.rows.indices + row * job.plan.k) {}

  __device__ void Fail(PayloadCheck check) const {
    atomicMin(failure, rank * kChecksEach + static_cast<uint32_t>(check));
  }

  uint32_t rank;
  const uint8_t* payload;
  uint32_t* failure;
  uint32_t* sum;
  int64_t* entries;
  uint32_t* counts;
  int64_t* starts;
  int64_t* indices;
};

// Reads a number of the header. The payload may be unaligned.
__device__ uint64_t HeaderField(const uint8_t* payload, int at, int bytes) {
  return ReadBytes(payload, sizeof(Header), at, bytes);
}

__device__ void CheckHeader(const Row& row, const Header& expected) {
  const auto check = [&](PayloadCheck what, uint64_t wanted, int at, int bytes) {
    if (HeaderField(row.payload, at, bytes) != wanted) row.Fail(what);
  };
  check(PayloadCheck::kMagic, expected.magic, offsetof(Header, magic), 4);
  check(PayloadCheck::kVersion, expected.version, offsetof(Header, version), 1);
  check(PayloadCheck::kCoding, expected.coding, offsetof(Header, coding), 1);
  check(PayloadCheck::kValueType, expected.dtype, offsetof(Header, dtype), 1);
  check(PayloadCheck::kReserved, 0, offsetof(Header, zero), 1);
  check(PayloadCheck::kReserved, 0, offsetof(Header, zero_too), 4);
  check(PayloadCheck::kElements, expected.n, offsetof(Header, n), 8);
}

// Checks header and checksum, and reads the number of entries. One thread for each payload.
__global__ void check_headers_kernel(Batch<DecodeJob> batch, int64_t first) {
  const DecodeJob job = JobOfBlock(batch);
  const DevicePlan& plan = job.plan;
  const Row row(job, first, blockIdx.y);
  CheckHeader(row, plan.header);
  const uint64_t entries = HeaderField(row.payload, offsetof(Header, entries), 8);
  const bool is_known = entries == 0 || entries == static_cast<uint64_t>(plan.k);
  if (!is_known) row.Fail(PayloadCheck::kEntries);
  *row.entries = is_known ? static_cast<int64_t>(entries) : 0;
  const uint64_t checksum = HeaderField(row.payload, kChecksumAt, 4);
  if (checksum != (plan.checksum_start ^ *row.sum)) row.Fail(PayloadCheck::kChecksum);
}

// Run lengths: returns the number of entries in a block, according to the payload; 0 if the block is too small for it.
__device__ uint32_t CountOfRuns(const DevicePlan& plan, const Row& row, int64_t block) {
  auto count = static_cast<uint32_t>(ReadBytes(row.payload, plan.size, kPositionsAt + 2 * block, 2));
  if (plan.has_full && (row.payload[plan.full_at + block / 8] >> (block % 8) & 1) != 0) count += kBlock;
  if (count <= BlockLength(plan.n, block)) return count;
  row.Fail(PayloadCheck::kPositions);
  return 0;
}

// Reads 32 bits of the section that has one set bit for each entry. Clears `fits` if a bit beyond its end is set.
__device__ uint32_t BitsAt(const DevicePlan& plan, const Row& row, int64_t bit, bool* fits) {
  const int64_t end = plan.bits_at + (plan.bits + 7) / 8;
  const auto word = static_cast<uint32_t>(ReadBytes(row.payload, end, plan.bits_at + bit / 8, 4));
  const int64_t left = plan.bits - bit;
  if (left >= 32) return word;
  const uint32_t mask = left > 0 ? (1u << left) - 1u : 0u;
  *fits &= (word & ~mask) == 0;
  return word & mask;
}

// Reads the bits of this thread, and returns how many are set.
__device__ int ReadBits(const DevicePlan& plan, const Row& row, int64_t first, uint32_t (&words)[kWords]) {
  int set = 0;
  bool fits = true;
  for (int w = 0; w < kWords; ++w) {
    words[w] = BitsAt(plan, row, first + 32 * w, &fits);
    set += __popc(words[w]);
  }
  if (!fits) row.Fail(PayloadCheck::kPositions);
  return set;
}

// Bits: counts the set bits in each tile.
__global__ void __launch_bounds__(kThreads) count_bits_kernel(Batch<DecodeJob> batch, int64_t first) {
  using Scan = cub::BlockScan<uint32_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const Share<DecodeJob> share = ShareOf(batch);
  const DevicePlan& plan = share.job.plan;
  const Row row(share.job, first, blockIdx.y);
  if (plan.coding == Coding::kRunLength) return;
  for (int64_t tile = share.block; tile < share.job.rows.tiles; tile += share.blocks) {
    uint32_t words[kWords];
    const auto set = static_cast<uint32_t>(ReadBits(plan, row, tile * kTileBits + 32 * kWords * threadIdx.x, words));
    uint32_t before = 0;
    uint32_t all = 0;
    Scan(storage).ExclusiveSum(set, before, all);
    if (threadIdx.x == 0) row.counts[tile] = all;
    __syncthreads();
  }
}

// Computes the number of entries before each tile, and compares their total with the header. One block per payload.
template <int kWidth>
__global__ void __launch_bounds__(kWidth) scan_counts_kernel(Batch<DecodeJob> batch, int64_t first) {
  using Scan = cub::BlockScan<int64_t, kWidth>;
  __shared__ typename Scan::TempStorage storage;
  const DecodeJob job = JobOfBlock(batch);
  const DevicePlan& plan = job.plan;
  const int64_t tiles = job.rows.tiles;
  const Row row(job, first, blockIdx.y);
  if (plan.coding == Coding::kDense) return;
  int64_t total = 0;
  for (int64_t base = 0; base < tiles; base += kWidth) {
    const int64_t tile = base + threadIdx.x;
    int64_t count = 0;
    if (tile < tiles) {
      if (plan.coding == Coding::kRunLength) row.counts[tile] = CountOfRuns(plan, row, tile);
      count = row.counts[tile];
    }
    int64_t before = 0;
    int64_t all = 0;
    Scan(storage).ExclusiveSum(count, before, all);
    if (tile < tiles) row.starts[tile] = total + before;
    total += all;
    __syncthreads();
  }
  if (threadIdx.x > 0) return;
  row.starts[tiles] = total;
  if (total != *row.entries) row.Fail(PayloadCheck::kPositions);
}

// Run lengths: decodes the positions. One thread block for each block of elements.
__global__ void __launch_bounds__(kRunThreads) decode_runs_kernel(Batch<DecodeJob> batch, int64_t first) {
  using Scan = cub::BlockScan<int64_t, kRunThreads>;
  __shared__ typename Scan::TempStorage storage;
  const Share<DecodeJob> share = ShareOf(batch);
  const DevicePlan& plan = share.job.plan;
  const Row row(share.job, first, blockIdx.y);
  if (plan.coding != Coding::kRunLength) return;
  for (int64_t block = share.block; block < plan.blocks; block += share.blocks) {
    const int64_t start = row.starts[block];
    const int64_t count = row.counts[block];
    if (start + count > plan.k) continue;  // scan_counts_kernel has reported this failure
    int64_t position = -1;                 // of the previous entry
    for (int64_t base = 0; base < count; base += kRunThreads) {
      const int64_t j = start + base + threadIdx.x;
      const bool is_entry = base + threadIdx.x < count;
      const auto step =
          is_entry ? static_cast<int64_t>(ReadBytes(row.payload, plan.size, plan.runs_at + 2 * j, 2)) + 1 : int64_t{0};
      int64_t steps = 0;
      int64_t all = 0;
      Scan(storage).InclusiveSum(step, steps, all);
      const bool fits = position + steps < BlockLength(plan.n, block);
      if (is_entry && !fits) row.Fail(PayloadCheck::kPositions);
      if (is_entry) row.indices[j] = fits ? block * kBlock + position + steps : 0;
      position += all;
      __syncthreads();
    }
  }
}

// Bits: writes an entry for each set bit.
__global__ void __launch_bounds__(kThreads) decode_bits_kernel(Batch<DecodeJob> batch, int64_t first) {
  using Scan = cub::BlockScan<uint32_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const Share<DecodeJob> share = ShareOf(batch);
  const DevicePlan& plan = share.job.plan;
  const Row row(share.job, first, blockIdx.y);
  if (plan.coding == Coding::kRunLength) return;
  for (int64_t tile = share.block; tile < share.job.rows.tiles; tile += share.blocks) {
    const int64_t begin = tile * kTileBits + 32 * kWords * threadIdx.x;
    uint32_t words[kWords];
    const auto set = static_cast<uint32_t>(ReadBits(plan, row, begin, words));
    uint32_t before = 0;
    Scan(storage).ExclusiveSum(set, before);
    int64_t j = row.starts[tile] + before;
    for (int w = 0; w < kWords; ++w) {
      for (uint32_t bits = words[w]; bits != 0 && j < plan.k; bits &= bits - 1, ++j) {
        int64_t index = begin + 32 * w + __ffs(static_cast<int>(bits)) - 1;
        if (plan.coding == Coding::kEliasFano) {
          const auto low = LowBitsOf(row.payload + kPositionsAt, plan.lower_bytes, plan.low, j);
          index = (index - j) << plan.low | static_cast<int64_t>(low);
        }
        row.indices[j] = index;
      }
    }
    __syncthreads();
  }
}

// Elias-Fano: checks that the indices ascend and are below n, because the low bits may be any. Without entries, all
// bits must be zero.
__global__ void __launch_bounds__(kThreads) check_order_kernel(Batch<DecodeJob> batch, int64_t first) {
  const Share<DecodeJob> share = ShareOf(batch);
  const DevicePlan& plan = share.job.plan;
  const Row row(share.job, first, blockIdx.y);
  if (plan.coding != Coding::kEliasFano) return;
  const int64_t entries = *row.entries;
  const int64_t thread = int64_t{share.block} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{share.blocks} * kThreads;
  if (row.starts[share.job.rows.tiles] != entries) return;  // not all indices were written; this failure is recorded
  for (int64_t j = thread; j < entries; j += threads) {
    if (!Ascends(row.indices, j, plan.n)) row.Fail(PayloadCheck::kPositions);
  }
  if (entries > 0) return;
  for (int64_t at = thread; at < plan.lower_bytes; at += threads) {
    if (row.payload[kPositionsAt + at] != 0) row.Fail(PayloadCheck::kPositions);
  }
}

int64_t TilesOf(const DevicePlan& plan) {
  if (plan.coding == Coding::kDense) return 0;
  return plan.coding == Coding::kRunLength ? plan.blocks : DivideUp(plan.bits, kTileBits);
}

}  // namespace

DecodeWork::DecodeWork(void* base, const std::vector<PayloadPlan>& plans, int64_t rows, bool has_spans) {
  Workspace workspace(base);
  const auto count = static_cast<int64_t>(plans.size());
  sum_count = count * rows;
  failures = workspace.Take<uint32_t>(count);
  sums = workspace.Take<uint32_t>(sum_count);
  for (const DevicePlan& plan : plans) slot_count += rows * SlotsFor(plan);
  slots = workspace.Take<uint32_t>(slot_count);
  int64_t slots_before = 0;
  for (const DevicePlan& plan : plans) {
    const auto at = static_cast<int64_t>(each.size());
    DecodeRows own{};
    own.tiles = TilesOf(plan);
    most_tiles = std::max(most_tiles, own.tiles);
    own.failure = failures + at;
    own.sums = sums + at * rows;
    own.entries = workspace.Take<int64_t>(rows);
    own.counts = workspace.Take<uint32_t>(rows * own.tiles);
    own.starts = workspace.Take<int64_t>(rows * (own.tiles + 1));
    own.indices = plan.coding == Coding::kDense ? nullptr : workspace.Take<int64_t>(rows * plan.k);
    own.spans = has_spans ? workspace.Take<int64_t>(rows * (SpansOf(plan.n) + 1)) : nullptr;
    if (SlotsFor(plan) > 0) own.slots = slots + slots_before;
    slots_before += rows * SlotsFor(plan);
    each.push_back(own);
    has_runs |= plan.coding == Coding::kRunLength;
    has_bits |= plan.coding == Coding::kEliasFano || plan.coding == Coding::kBitmap;
    has_low |= plan.coding == Coding::kEliasFano;
  }
  size = workspace.used();
}

unsigned BlocksOf(const DecodeJob& job) {
  return std::max(BlocksFor(job.rows.tiles, 1), BlocksFor(job.plan.size, kBlockBytes));
}

cudaError_t begin_decode_launch(const DecodeWork& work, cudaStream_t stream) {
  return cudaMemsetAsync(work.failures, 0xff, work.each.size() * sizeof(uint32_t), stream);
}

cudaError_t decode_launch(const Batch<DecodeJob>& batch, int64_t first, int64_t count, const DecodeWork& work,
                          cudaStream_t stream) {
  const auto height = static_cast<unsigned>(count);
  const dim3 one_each(static_cast<unsigned>(batch.count), height);
  const dim3 shares(batch.blocks, height);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(
      cudaMemsetAsync(work.sums, 0, static_cast<size_t>(work.sum_count) * sizeof(uint32_t), stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(LaunchChecksums(batch, first, count, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(check_headers_kernel, one_each, 1, stream, batch, first));
  const auto launch = [&](bool needed, auto kernel, dim3 grid, int threads) {
    return needed ? Launch(kernel, grid, threads, stream, batch, first) : cudaSuccess;
  };
  const bool has_any = work.has_runs || work.has_bits;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(launch(work.has_bits, count_bits_kernel, shares, kThreads));
  const bool has_few = work.most_tiles <= kFewScanThreads;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(
      launch(has_any && has_few, scan_counts_kernel<kFewScanThreads>, one_each, kFewScanThreads));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(
      launch(has_any && !has_few, scan_counts_kernel<kScanThreads>, one_each, kScanThreads));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(launch(work.has_runs, decode_runs_kernel, shares, kRunThreads));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(launch(work.has_bits, decode_bits_kernel, shares, kThreads));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(launch(work.has_low, check_order_kernel, shares, kThreads));
  return NumberGroups(batch, count, work.slots, work.slot_count, stream);
}

}  // namespace hvd_sparse
