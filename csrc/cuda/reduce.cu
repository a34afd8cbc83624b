#include "reduce.h"

#include "batch.cuh"
#include "entries.cuh"
#include "gather.cuh"

namespace hvd_sparse {
namespace {

constexpr int64_t kMostBytes = int64_t{256} << 20;  // limit of a workspace, unless a single rank needs more

// Finds the outputs of ascending elements.
class SliceFinder {
 public:
  __device__ explicit SliceFinder(const DecodeJob& job)
      : whole_(job.whole), has_one_(job.slices == nullptr), n_(job.plan.n), finder_(job.slices, job.slice_count) {}

  // Returns the addresses of the element's residual and velocity; null for those that do not exist.
  __device__ Feedback Find(int64_t element) {
    if (element < 0 || element >= n_) return {nullptr, nullptr};
    const FeedbackSlice* slice = has_one_ ? &whole_ : finder_.Find(element);
    if (slice == nullptr) return {nullptr, nullptr};
    const int64_t at = element - slice->begin;
    float* velocity = slice->feedback.velocity;
    return {slice->feedback.residual + at, velocity == nullptr ? nullptr : velocity + at};
  }

 private:
  FeedbackSlice whole_;
  bool has_one_;
  int64_t n_;
  PieceFinder<FeedbackSlice> finder_;
};

struct alignas(16) Floats {
  float at[4];
};

// Copies floats, four at a time if both addresses permit it.
__device__ void CopyFloats(const float* from, int size, float* to) {
  const auto is_aligned = [](const float* at) { return reinterpret_cast<uintptr_t>(at) % sizeof(Floats) == 0; };
  const int packs = is_aligned(to) && is_aligned(from) ? size / 4 : 0;
  for (int i = static_cast<int>(threadIdx.x); i < packs; i += kAddThreads) {
    reinterpret_cast<Floats*>(to)[i] = reinterpret_cast<const Floats*>(from)[i];
  }
  for (int i = 4 * packs + static_cast<int>(threadIdx.x); i < size; i += kAddThreads) to[i] = from[i];
}

// Writes the sums of elements [begin, begin + size) to the outputs that contain them.
__device__ void WriteSums(const DecodeJob& job, const float* sums, int64_t begin, int size) {
  const int64_t count = job.slices == nullptr ? 1 : job.slice_count;
  const int64_t end = begin + size;
  for (int64_t s = job.slices == nullptr ? 0 : FirstBeyond(job.slices, count, begin); s < count; ++s) {
    const FeedbackSlice slice = job.slices == nullptr ? job.whole : job.slices[s];
    if (slice.begin >= end) break;
    const int64_t from = slice.begin > begin ? slice.begin : begin;
    const int64_t to = slice.begin + slice.size < end ? slice.begin + slice.size : end;
    CopyFloats(sums + (from - begin), static_cast<int>(to - from), slice.feedback.residual + (from - slice.begin));
  }
}

// Finds the entries of each span: sum_kernel would wait for these searches.
__global__ void __launch_bounds__(kThreads) find_spans_kernel(Batch<DecodeJob> batch) {
  const Share<DecodeJob> share = ShareOf(batch);
  const DecodeJob& job = share.job;
  if (*job.rows.failure != kNoFailure) return;
  const int64_t spans = SpansOf(job.plan.n);
  for (int64_t span = int64_t{share.block} * kThreads + threadIdx.x; span <= spans;
       span += int64_t{share.blocks} * kThreads) {
    job.rows.spans[blockIdx.y * (spans + 1) + span] = EntriesBelow(job, blockIdx.y, span * kSpan);
  }
}

// Writes the sums of the payloads. A thread block adds the elements of a span in shared memory: sums in global memory
// would be read and written once for each rank.
__global__ void __launch_bounds__(kAddThreads)
    sum_kernel(Batch<DecodeJob> batch, int64_t first, int64_t count, float scale) {
  __shared__ Floats packs[kSpan / 4];
  float* sums = packs[0].at;
  const Share<DecodeJob> share = ShareOf(batch);
  const DecodeJob& job = share.job;
  if (*job.rows.failure != kNoFailure) return;
  const int64_t spans = SpansOf(job.plan.n);
  for (int64_t span = share.block; span < spans; span += share.blocks) {
    const int64_t begin = span * kSpan;
    const auto size = static_cast<int>(job.plan.n - begin < kSpan ? job.plan.n - begin : kSpan);
    for (int i = static_cast<int>(threadIdx.x); i < kSpan / 4; i += kAddThreads) packs[i] = {};
    __syncthreads();
    ForEntries(
        job, first, count,
        [&](int64_t row, bool is_end) { return job.rows.spans[row * (spans + 1) + span + (is_end ? 1 : 0)]; }, [] {},
        [&](const Entry& entry) {
          const int64_t i = entry.index - begin;
          if (i >= 0 && i < size) sums[i] += scale * entry.value;
        });
    WriteSums(job, sums, begin, size);
    __syncthreads();
  }
}

// Adds the payloads to the outputs. A thread block owns a block of elements.
__global__ void __launch_bounds__(kAddThreads)
    add_kernel(Batch<DecodeJob> batch, int64_t first, int64_t count, float scale) {
  const Share<DecodeJob> share = ShareOf(batch);
  const DecodeJob& job = share.job;
  if (*job.rows.failure != kNoFailure) return;
  for (int64_t block = share.block; block < job.plan.blocks; block += share.blocks) {
    SliceFinder finder(job);
    ForEntries(
        job, first, count,
        [&](int64_t row, bool is_end) { return EntriesBelow(job, row, (block + (is_end ? 1 : 0)) * kBlock); },
        [&] { finder = SliceFinder(job); },
        [&](const Entry& entry) {
          float* out = finder.Find(entry.index).residual;
          if (out != nullptr) *out += scale * entry.value;
        });
  }
}

// Calls set(&residual) for this block's share of all slices.
template <typename Set>
__device__ void ForOutputs(const Share<DecodeJob>& share, const Set& set) {
  const int64_t count = share.job.slices == nullptr ? 1 : share.job.slice_count;
  for (int64_t s = 0; s < count; ++s) {
    const FeedbackSlice slice = share.job.slices == nullptr ? share.job.whole : share.job.slices[s];
    for (int64_t i = int64_t{share.block} * kThreads + threadIdx.x; i < slice.size;
         i += int64_t{share.blocks} * kThreads) {
      set(slice.feedback.residual + i);
    }
  }
}

__global__ void __launch_bounds__(kThreads) zero_outputs_kernel(Batch<DecodeJob> batch) {
  ForOutputs(ShareOf(batch), [](float* out) { *out = 0.0f; });
}

// Writes the sums of payloads of which each span has some entries.
cudaError_t WriteDense(const Batch<DecodeJob>& outputs, const Batch<DecodeJob>& spans, int64_t first, int64_t count,
                       float scale, cudaStream_t stream) {
  const dim3 rows(spans.blocks, static_cast<unsigned>(count));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(find_spans_kernel, rows, kThreads, stream, spans));
  return Launch(sum_kernel, outputs.blocks, kAddThreads, stream, outputs, first, count, scale);
}

// Writes the sums of the first payloads, or adds later ones to them.
cudaError_t AddSparse(const Batch<DecodeJob>& batch, bool is_first, int64_t first, int64_t count, float scale,
                      cudaStream_t stream) {
  if (is_first) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(zero_outputs_kernel, batch.blocks, kThreads, stream, batch));
  }
  return Launch(add_kernel, batch.blocks, kAddThreads, stream, batch, first, count, scale);
}

// Returns the number of blocks for the outputs of a job: one for each span, or for some if there are many. Measured on
// H100: four spans of 100 million elements each take 198 us, one each 217.
unsigned OutputBlocksOf(const DevicePlan& plan) {
  constexpr int64_t kMany = 1024;
  constexpr int64_t kSpansEach = 4;
  const int64_t spans = SpansOf(plan.n);
  return std::max(BlocksFor(std::min(spans, kMany), 1), BlocksFor(spans, kSpansEach));
}

// Returns whether there are so many entries that sums should be in shared memory. Measured on H100.
template <typename Items>
bool IsDense(const Items& items, int64_t ranks) {
  constexpr double kDense = 1.0 / kSpan;
  double entries = 0;
  double elements = 0;
  for (const auto& item : items) {
    entries += static_cast<double>(item.plan.k) * static_cast<double>(ranks);
    elements += static_cast<double>(item.plan.n);
  }
  return entries > kDense * elements;
}

__device__ void Record(uint32_t failure, DecodeStatus* status) {
  if (atomicAdd(&status->refused, 1ull) == 0) status->first = failure;
}

__global__ void __launch_bounds__(kThreads) finish_reduce_kernel(Batch<DecodeJob> batch, DecodeStatus* status) {
  const Share<DecodeJob> share = ShareOf(batch);
  const uint32_t failure = *share.job.rows.failure;
  if (failure == kNoFailure) return;
  ForOutputs(share, [](float* out) { *out = BitsToFloat(0x7fc00000u); });  // NaN
  if (share.block == 0 && threadIdx.x == 0) Record(failure, status);
}

__global__ void __launch_bounds__(kThreads) clear_kernel(Batch<DecodeJob> batch, float retained, DecodeStatus* status) {
  const Share<DecodeJob> share = ShareOf(batch);
  const DecodeJob& job = share.job;
  const int64_t first = int64_t{share.block} * kThreads + threadIdx.x;
  if (*job.rows.failure != kNoFailure) {
    if (first == 0) Record(*job.rows.failure, status);
    return;
  }
  const int64_t entries = *job.rows.entries;
  SliceFinder finder(job);
  for (int64_t j = first; j < entries; j += int64_t{share.blocks} * kThreads) {
    const int64_t index = IndexAt(job, 0, j);
    const Feedback feedback = finder.Find(index);
    if (feedback.residual == nullptr) continue;
    const bool is_exact = job.plan.dtype == DType::kFloat32;
    const float sent = is_exact && retained == 0 ? 0.0f : FloatAt(job, 0, job.data, j, index);
    *feedback.residual = is_exact ? 0.0f : *feedback.residual - sent;
    if (retained != 0) *feedback.residual += retained * sent;
    if (feedback.velocity != nullptr) *feedback.velocity = 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads)
    unpack_kernel(DecodeJob job, int64_t* report, int64_t* indices, void* values) {
  const DevicePlan& plan = job.plan;
  const uint8_t* payload = job.data;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t entries = *job.rows.entries;
  if (first == 0) {
    report[0] = *job.rows.failure;
    report[1] = entries;
  }
  if (*job.rows.failure != kNoFailure) return;
  for (int64_t j = first; j < entries; j += int64_t{gridDim.x} * kThreads) {
    indices[j] = IndexAt(job, 0, j);
    if (plan.dtype == DType::kFloat64) {
      const uint64_t bits = ReadBytes(payload, plan.size, plan.values_at + 8 * j, 8);
      static_cast<double*>(values)[j] = __longlong_as_double(static_cast<long long>(bits));
    } else {
      static_cast<float*>(values)[j] = FloatAt(job, 0, payload, j, indices[j]);
    }
  }
}

// Returns the number of ranks that are decoded at a time: all, unless this needs too much memory.
int64_t RanksTogether(const std::vector<PayloadPlan>& plans, int64_t ranks) {
  const int64_t each = DecodeWork(nullptr, plans, 1, true).size;
  return std::clamp<int64_t>(kMostBytes / each, 1, std::clamp<int64_t>(ranks, 1, kLargestGridHeight));
}

template <typename Items>
std::vector<PayloadPlan> PlansOf(const Items& items) {
  std::vector<PayloadPlan> plans;
  for (const auto& item : items) plans.push_back(item.plan);
  return plans;
}

bool IsWhole(const ReduceSelection& selection) {
  return selection.slices.size() == 1 && selection.slices[0].begin == 0 && selection.slices[0].size == selection.plan.n;
}

// The jobs for decoding `rows` ranks at a time, and their workspace.
struct ReduceWork {
  ReduceWork(void* base, const ReduceSelections& selections, int64_t stride, int64_t rows)
      : decode(base, PlansOf(selections), rows, true), tables(static_cast<uint8_t*>(base) + decode.size) {
    for (const ReduceSelection& selection : selections) {
      DecodeJob job = NextJob(selection.plan, selection.first, stride);
      if (IsWhole(selection)) {
        job.whole = selection.slices[0];
      } else {
        job.slices = tables.Add(selection.slices);
        job.slice_count = static_cast<int64_t>(selection.slices.size());
      }
      jobs.push_back(job);
      blocks.push_back(BlocksOf(job));
    }
    batch = tables.AddBatch(jobs, blocks);
    spans = Divide([](const DevicePlan& plan) { return BlocksFor(SpansOf(plan.n) + 1); });
    outputs = Divide([](const DevicePlan& plan) { return OutputBlocksOf(plan); });
    entries = Divide([](const DevicePlan& plan) { return BlocksFor(plan.k); });
  }

  // One job for each rank's payload, all with the same output.
  ReduceWork(void* base, const LocatedPayloads& payloads, float* out)
      : decode(base, PlansOf(payloads), 1), tables(static_cast<uint8_t*>(base) + decode.size) {
    for (const LocatedPayload& located : payloads) {
      DecodeJob job = NextJob(located.plan, located.payload, 0);
      job.rank = static_cast<int64_t>(jobs.size());
      job.rows.failure = decode.failures;
      job.whole = {0, located.plan.n, {out, nullptr}};
      jobs.push_back(job);
      blocks.push_back(BlocksOf(job));
    }
    batch = tables.AddBatch(jobs, blocks);
  }

  // Returns the next of the jobs, without outputs.
  DecodeJob NextJob(const PayloadPlan& plan, const uint8_t* data, int64_t stride) {
    DecodeJob job{};
    job.plan = ForDevice(plan, &tables);
    job.data = data;
    job.stride = stride;
    job.rows = decode.each[jobs.size()];
    return job;
  }

  template <typename BlocksOfPlan>
  Batch<DecodeJob> Divide(const BlocksOfPlan& blocks_of) {
    std::vector<unsigned> sizes;
    for (const DecodeJob& job : jobs) sizes.push_back(blocks_of(job.plan));
    return tables.Divide(batch, sizes);
  }

  cudaError_t Begin(cudaStream_t stream) const {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(tables.Upload(stream));
    return begin_decode_launch(decode, stream);
  }

  DecodeWork decode;
  Tables tables;
  std::vector<DecodeJob> jobs;
  std::vector<unsigned> blocks;
  Batch<DecodeJob> batch;      // for decoding
  Batch<DecodeJob> spans{};    // the same jobs, with blocks for the spans,
  Batch<DecodeJob> outputs{};  // for the outputs,
  Batch<DecodeJob> entries{};  // and for the entries of one rank
};

int64_t WorkspaceSize(const ReduceSelections& selections, int64_t rows) {
  const ReduceWork work(nullptr, selections, 0, rows);
  return work.decode.size + work.tables.size();
}

}  // namespace

int64_t reduce_workspace_size(const ReduceSelections& selections, int64_t ranks) {
  return selections.empty() ? 0 : WorkspaceSize(selections, RanksTogether(PlansOf(selections), ranks));
}

cudaError_t reduce_launch(const ReduceSelections& selections, int64_t ranks, int64_t stride, float scale,
                          DecodeStatus* status, void* workspace, cudaStream_t stream) {
  if (selections.empty()) return cudaSuccess;
  const int64_t together = RanksTogether(PlansOf(selections), ranks);
  const ReduceWork work(workspace, selections, stride, together);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.Begin(stream));
  const Batch<DecodeJob>& outputs = work.outputs;
  if (ranks == 0) return Launch(zero_outputs_kernel, outputs.blocks, kThreads, stream, outputs);
  const bool is_dense = IsDense(selections, together);
  for (int64_t first = 0; first < ranks; first += together) {
    const int64_t count = std::min(together, ranks - first);
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(decode_launch(work.batch, first, count, work.decode, stream));
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(first == 0 && is_dense
                                        ? WriteDense(outputs, work.spans, first, count, scale, stream)
                                        : AddSparse(outputs, first == 0, first, count, scale, stream));
  }
  return Launch(finish_reduce_kernel, outputs.blocks, kThreads, stream, outputs, status);
}

cudaError_t clear_launch(const ReduceSelections& selections, float retained, DecodeStatus* status, void* workspace,
                         cudaStream_t stream) {
  if (selections.empty()) return cudaSuccess;
  const ReduceWork work(workspace, selections, 0, 1);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.Begin(stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(decode_launch(work.batch, 0, 1, work.decode, stream));
  return Launch(clear_kernel, work.entries.blocks, kThreads, stream, work.entries, retained, status);
}

int64_t reduce_payloads_workspace_size(const PayloadPlan& plan, int64_t ranks) {
  return reduce_workspace_size(WholeSelection(plan, nullptr, nullptr), ranks);
}

cudaError_t reduce_payloads_launch(const PayloadPlan& plan, const uint8_t* gathered, int64_t ranks, int64_t stride,
                                   float scale, float* out, DecodeStatus* status, void* workspace,
                                   cudaStream_t stream) {
  return reduce_launch(WholeSelection(plan, gathered, out), ranks, stride, scale, status, workspace, stream);
}

int64_t reduce_located_workspace_size(const LocatedPayloads& payloads) {
  const ReduceWork work(nullptr, payloads, nullptr);
  return work.decode.size + work.tables.size();
}

cudaError_t reduce_located_launch(const LocatedPayloads& payloads, float scale, float* out, DecodeStatus* status,
                                  void* workspace, cudaStream_t stream) {
  if (payloads.empty()) return cudaSuccess;
  const ReduceWork work(workspace, payloads, out);
  const auto batch_of = [&](size_t rank) { return BatchOf(work.jobs[rank], OutputBlocksOf(work.jobs[rank].plan)); };
  const Batch<DecodeJob> one = batch_of(0);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.Begin(stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(decode_launch(work.batch, 0, 1, work.decode, stream));
  for (size_t rank = 0; rank < payloads.size(); ++rank) {  // separate launches keep the order of ranks
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(AddSparse(batch_of(rank), rank == 0, 0, 1, scale, stream));
  }
  return Launch(finish_reduce_kernel, one.blocks, kThreads, stream, one, status);
}

int64_t unpack_workspace_size(const PayloadPlan& plan) {
  return WorkspaceSize(WholeSelection(plan, nullptr, nullptr), 1);
}

cudaError_t unpack_launch(const PayloadPlan& plan, const uint8_t* payload, int64_t* report, int64_t* indices,
                          void* values, void* workspace, cudaStream_t stream) {
  const ReduceWork work(workspace, WholeSelection(plan, payload, nullptr), 0, 1);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.Begin(stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(decode_launch(work.batch, 0, 1, work.decode, stream));
  return Launch(unpack_kernel, BlocksFor(plan.k), kThreads, stream, work.batch.one, report, indices, values);
}

}  // namespace hvd_sparse
