#include "decode.h"

#include <cub/block/block_scan.cuh>

#include "../core/entries.h"
#include "checksum.h"

namespace hvd_sparse {
namespace {

constexpr int kRunThreads = 128;
constexpr int kScanThreads = 1024;
constexpr int kWords = 4;  // of 32 bits, of a thread
constexpr int64_t kTileBits = int64_t{32} * kWords * kThreads;

// One payload of those that a grid works on, a row each.
struct Row {
  __device__ Row(const PayloadPlan& plan, const Payloads& payloads, const DecodeWork& work, int64_t row)
      : rank(static_cast<uint32_t>(payloads.first + row)),
        payload(payloads.data + row * payloads.stride),
        failure(work.failure),
        sum(work.sums + row),
        entries(work.entries + row),
        counts(work.counts + row * work.tiles),
        starts(work.starts + row * (work.tiles + 1)),
        indices(work.indices + row * plan.k) {}

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

// A number of the header, wherever the payload lies.
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

// A thread a payload: header and checksum; how many entries to look for.
__global__ void __launch_bounds__(kThreads) check_headers_kernel(PayloadPlan plan, Payloads payloads, DecodeWork work) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= payloads.count) return;
  const Row row(plan, payloads, work, at);
  CheckHeader(row, plan.header);
  const uint64_t entries = HeaderField(row.payload, offsetof(Header, entries), 8);
  const bool is_known = entries == 0 || entries == static_cast<uint64_t>(plan.k);
  if (!is_known) row.Fail(PayloadCheck::kEntries);
  *row.entries = is_known ? static_cast<int64_t>(entries) : 0;
  const uint64_t checksum = HeaderField(row.payload, kChecksumAt, 4);
  if (checksum != (plan.checksum_start ^ *row.sum)) row.Fail(PayloadCheck::kChecksum);
}

// Run lengths: how many entries a block says it has; none if it cannot have as many.
__device__ uint32_t CountOfRuns(const PayloadPlan& plan, const Row& row, int64_t block) {
  auto count = static_cast<uint32_t>(ReadBytes(row.payload, plan.size, kPositionsAt + 2 * block, 2));
  if (plan.has_full && (row.payload[plan.full_at + block / 8] >> (block % 8) & 1) != 0) count += kBlock;
  if (count <= BlockLength(plan.n, block)) return count;
  row.Fail(PayloadCheck::kPositions);
  return 0;
}

// 32 bits of the section that has one set for each entry; none behind its end may be.
__device__ uint32_t BitsAt(const PayloadPlan& plan, const Row& row, int64_t bit, bool* fits) {
  const int64_t end = plan.bits_at + (plan.bits + 7) / 8;
  const auto word = static_cast<uint32_t>(ReadBytes(row.payload, end, plan.bits_at + bit / 8, 4));
  const int64_t left = plan.bits - bit;
  if (left >= 32) return word;
  const uint32_t mask = left > 0 ? (1u << left) - 1u : 0u;
  *fits &= (word & ~mask) == 0;
  return word & mask;
}

// The bits of this thread, and how many are set.
__device__ int ReadBits(const PayloadPlan& plan, const Row& row, int64_t first, uint32_t (&words)[kWords]) {
  int set = 0;
  bool fits = true;
  for (int w = 0; w < kWords; ++w) {
    words[w] = BitsAt(plan, row, first + 32 * w, &fits);
    set += __popc(words[w]);
  }
  if (!fits) row.Fail(PayloadCheck::kPositions);
  return set;
}

// Bits: how many are set in each tile.
__global__ void __launch_bounds__(kThreads) count_bits_kernel(PayloadPlan plan, Payloads payloads, DecodeWork work) {
  using Scan = cub::BlockScan<uint32_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const Row row(plan, payloads, work, blockIdx.y);
  for (int64_t tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
    uint32_t words[kWords];
    const auto set = static_cast<uint32_t>(ReadBits(plan, row, tile * kTileBits + 32 * kWords * threadIdx.x, words));
    uint32_t before = 0;
    uint32_t all = 0;
    Scan(storage).ExclusiveSum(set, before, all);
    if (threadIdx.x == 0) row.counts[tile] = all;
    __syncthreads();
  }
}

// A block a payload: how many entries lie before each tile; there must be as many as the header says.
__global__ void __launch_bounds__(kScanThreads)
    scan_counts_kernel(PayloadPlan plan, Payloads payloads, DecodeWork work) {
  using Scan = cub::BlockScan<int64_t, kScanThreads>;
  __shared__ typename Scan::TempStorage storage;
  const Row row(plan, payloads, work, blockIdx.x);
  int64_t total = 0;
  for (int64_t base = 0; base < work.tiles; base += kScanThreads) {
    const int64_t tile = base + threadIdx.x;
    int64_t count = 0;
    if (tile < work.tiles) {
      if (plan.coding == Coding::kRunLength) row.counts[tile] = CountOfRuns(plan, row, tile);
      count = row.counts[tile];
    }
    int64_t before = 0;
    int64_t all = 0;
    Scan(storage).ExclusiveSum(count, before, all);
    if (tile < work.tiles) row.starts[tile] = total + before;
    total += all;
    __syncthreads();
  }
  if (threadIdx.x > 0) return;
  row.starts[work.tiles] = total;
  if (total != *row.entries) row.Fail(PayloadCheck::kPositions);
}

// A thread block a block of elements: its run lengths, summed.
__global__ void __launch_bounds__(kRunThreads)
    decode_runs_kernel(PayloadPlan plan, Payloads payloads, DecodeWork work) {
  using Scan = cub::BlockScan<int64_t, kRunThreads>;
  __shared__ typename Scan::TempStorage storage;
  const Row row(plan, payloads, work, blockIdx.y);
  for (int64_t block = blockIdx.x; block < plan.blocks; block += gridDim.x) {
    const int64_t start = row.starts[block];
    const int64_t count = row.counts[block];
    if (start + count > plan.k) continue;  // found out already, when the counts were summed
    int64_t position = -1;                 // of the entry before
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

// Bits: an entry for each that is set.
__global__ void __launch_bounds__(kThreads) decode_bits_kernel(PayloadPlan plan, Payloads payloads, DecodeWork work) {
  using Scan = cub::BlockScan<uint32_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const Row row(plan, payloads, work, blockIdx.y);
  for (int64_t tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
    const int64_t first = tile * kTileBits + 32 * kWords * threadIdx.x;
    uint32_t words[kWords];
    const auto set = static_cast<uint32_t>(ReadBits(plan, row, first, words));
    uint32_t before = 0;
    Scan(storage).ExclusiveSum(set, before);
    int64_t j = row.starts[tile] + before;
    for (int w = 0; w < kWords; ++w) {
      for (uint32_t bits = words[w]; bits != 0 && j < plan.k; bits &= bits - 1, ++j) {
        int64_t index = first + 32 * w + __ffs(static_cast<int>(bits)) - 1;
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

// Elias-Fano's low bits may be any: what they make need not ascend, nor be below n. With no entries all are zero.
__global__ void __launch_bounds__(kThreads) check_order_kernel(PayloadPlan plan, Payloads payloads, DecodeWork work) {
  const Row row(plan, payloads, work, blockIdx.y);
  const int64_t entries = *row.entries;
  for (int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x; j < entries; j += int64_t{gridDim.x} * kThreads) {
    if (!Ascends(row.indices, j, plan.n)) row.Fail(PayloadCheck::kPositions);
  }
  if (entries > 0) return;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < plan.lower_bytes;
       at += int64_t{gridDim.x} * kThreads) {
    if (row.payload[kPositionsAt + at] != 0) row.Fail(PayloadCheck::kPositions);
  }
}

int64_t TilesOf(const PayloadPlan& plan) {
  if (plan.coding == Coding::kDense) return 0;
  return plan.coding == Coding::kRunLength ? plan.blocks : DivideUp(plan.bits, kTileBits);
}

cudaError_t CountEntries(const PayloadPlan& plan, const Payloads& payloads, const DecodeWork& work,
                         cudaStream_t stream) {
  const auto height = static_cast<unsigned>(payloads.count);
  if (plan.coding != Coding::kRunLength) {
    const dim3 grid(BlocksFor(work.tiles, 1), height);
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(count_bits_kernel, grid, kThreads, stream, plan, payloads, work));
  }
  return Launch(scan_counts_kernel, height, kScanThreads, stream, plan, payloads, work);
}

cudaError_t DecodeEntries(const PayloadPlan& plan, const Payloads& payloads, const DecodeWork& work,
                          cudaStream_t stream) {
  const auto height = static_cast<unsigned>(payloads.count);
  const dim3 grid(BlocksFor(work.tiles, 1), height);
  if (plan.coding == Coding::kRunLength) {
    return Launch(decode_runs_kernel, grid, kRunThreads, stream, plan, payloads, work);
  }
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(decode_bits_kernel, grid, kThreads, stream, plan, payloads, work));
  if (plan.coding != Coding::kEliasFano) return cudaSuccess;
  return Launch(check_order_kernel, dim3(BlocksFor(plan.k), height), kThreads, stream, plan, payloads, work);
}

}  // namespace

DecodeWork::DecodeWork(void* base, const PayloadPlan& plan, int64_t count) {
  Workspace workspace(base);
  tiles = TilesOf(plan);
  failure = workspace.Take<uint32_t>(1);
  sums = workspace.Take<uint32_t>(count);
  entries = workspace.Take<int64_t>(count);
  counts = workspace.Take<uint32_t>(count * tiles);
  starts = workspace.Take<int64_t>(count * (tiles + 1));
  indices = plan.coding == Coding::kDense ? nullptr : workspace.Take<int64_t>(count * plan.k);
  size = workspace.used();
}

cudaError_t begin_decode_launch(const DecodeWork& work, cudaStream_t stream) {
  return cudaMemsetAsync(work.failure, 0xff, sizeof(uint32_t), stream);
}

cudaError_t decode_launch(const PayloadPlan& plan, const Payloads& payloads, const DecodeWork& work,
                          cudaStream_t stream) {
  const auto count = static_cast<size_t>(payloads.count);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(work.sums, 0, count * sizeof(uint32_t), stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(
      checksum_launch(payloads.data, payloads.stride, payloads.count, plan.size, work.sums, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(
      Launch(check_headers_kernel, BlocksFor(payloads.count), kThreads, stream, plan, payloads, work));
  if (plan.coding == Coding::kDense) return cudaSuccess;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(CountEntries(plan, payloads, work, stream));
  return DecodeEntries(plan, payloads, work, stream);
}

}  // namespace hvd_sparse
