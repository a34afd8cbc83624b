#include "select.h"

#include <cmath>
#include <cstring>

#include "radix_select.cuh"

namespace hvd_sparse {
namespace {

// Returns the room for candidates: twice the wanted number. Hints adapt, so that rarely more than 1.25 k elements reach
// them.
int64_t CapacityFor(int64_t n, int64_t k) { return std::min(n, 2 * k + 4096); }

template <typename T>
__global__ void begin_select_kernel(Batch<SelectJob<T>> batch) {
  const SelectJob<T> job = JobOfBlock(batch);
  SelectState* state = job.candidates.state;
  const double threshold = job.hint != nullptr ? HintFor(*job.hint, job.k) : job.threshold;
  const uint64_t bar = threshold > 0 ? SmallestReaching<T>(threshold) : 0;
  state->hinted = threshold > 0 && threshold < INFINITY;
  state->bar = state->hinted ? (bar > 1 ? bar : 1) : uint64_t{kInfinityBits<T>} + 1;
  state->wanted = static_cast<uint64_t>(job.k);
  state->key.rank = static_cast<Count>(job.k);
  state->seed = job.seed;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) gather_kernel(Batch<SelectJob<T>> batch) {
  __shared__ CollectedCandidates collected;
  const Share<SelectJob<T>> share = ShareOf(batch);
  const CandidateBuffer& candidates = share.job.candidates;
  if (!candidates.state->hinted) return;
  const uint64_t bar = candidates.state->bar;
  const WriteCandidate write{candidates};
  const int64_t n = share.job.elements.n;
  Reader<T> reader(share.job.elements);
  collected.Begin();
  for (int64_t base = int64_t{share.block} * kThreads; base < n; base += int64_t{share.blocks} * kThreads) {
    const int64_t i = base + threadIdx.x;
    const T value = i < n ? reader.At(i) : T{};
    collected.Add(ReachesBar(value, bar), Candidate{SignedKey(value), i}, &candidates.state->gathered, write);
  }
  collected.Flush(&candidates.state->gathered, kThreads, write);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) finish_select_kernel(Batch<SelectJob<T>> batch) {
  const Share<SelectJob<T>> share = ShareOf(batch);
  const SelectJob<T>& job = share.job;
  Reader<T> reader(job.elements);
  for (int64_t j = int64_t{share.block} * kThreads + threadIdx.x; j < job.k; j += int64_t{share.blocks} * kThreads) {
    const uint64_t number = job.sorted[j];
    const auto index = static_cast<int64_t>((job.carries_values ? number >> 32 : number) ^ job.tag);
    job.indices[j] = index;
    if (job.carries_values) {
      const auto bits = static_cast<BitsOf<T>>(number);
      std::memcpy(&job.values[j], &bits, sizeof bits);
    } else {
      job.values[j] = reader.At(index);
    }
  }
  if (share.block > 0 || threadIdx.x > 0) return;
  const SelectState* state = job.candidates.state;
  const double threshold = MagnitudeOfKey<T>(state->key.prefix);
  const auto passed = static_cast<int64_t>(state->hinted ? state->gathered : static_cast<Count>(job.k));
  job.info[0] = threshold;
  job.info[1] = static_cast<double>(passed);
  if (job.hint != nullptr) LearnHint(job.hint, job.k, threshold, passed);
}

template <typename T>
cudaError_t Begin(const Batch<SelectJob<T>>& batch, const SelectWork& work, cudaStream_t stream) {
  const auto count = static_cast<size_t>(batch.count);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(work.states, 0, count * sizeof(SelectState), stream));
  return Launch(begin_select_kernel<T>, static_cast<unsigned>(count), 1, stream, batch);
}

// Reduces the gathered candidates to the selection.
template <typename T>
cudaError_t Cut(const Batch<SelectJob<T>>& batch, const SelectWork& work, cudaStream_t stream) {
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(FindKey(batch, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(FindTie(batch, stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(keep_kernel<T>, batch.blocks, kThreads, stream, batch));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(
      sort_numbers_launch(work.kept, work.total, work.sort_range, work.sort, work.sort_size, work.sorted, stream));
  return Launch(finish_select_kernel<T>, batch.blocks, kThreads, stream, batch);
}

// Prepares a single selection.
template <typename T>
cudaError_t PrepareOne(const Elements<T>& elements, const SelectParams& params, const SelectOutput& output,
                       const SelectWork& work, Batch<SelectJob<T>>* batch) {
  std::vector<SelectJob<T>> jobs(1);
  jobs[0].elements = elements;
  jobs[0].threshold = params.threshold_hint;
  jobs[0].k = params.k;
  jobs[0].seed = params.seed;
  jobs[0].indices = output.indices;
  jobs[0].values = static_cast<T*>(output.values);
  jobs[0].info = output.info;
  std::vector<unsigned> blocks;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(PrepareSelect(work, &jobs, &blocks));
  *batch = BatchOf(jobs[0], blocks[0]);
  return cudaSuccess;
}

}  // namespace

SelectWork::SelectWork(void* base, const std::vector<SelectSize>& sizes, int64_t item_size) {
  Workspace workspace(base);
  const auto count = static_cast<int64_t>(sizes.size());
  int64_t largest = 1;
  total = 0;
  states = workspace.Take<SelectState>(count);
  for (const SelectSize& size : sizes) {
    const int64_t capacity = CapacityFor(size.n, size.k);
    SelectState* state = states + candidates.size();
    auto* keys = workspace.Take<uint64_t>(capacity);
    candidates.push_back({state, keys, workspace.Take<int64_t>(capacity), capacity});
    largest = std::max(largest, size.n);
    total += size.k;
  }
  kept = workspace.Take<uint64_t>(total);
  sorted = workspace.Take<uint64_t>(total);
  bits = BitsBelow(largest);
  const int sort_bits = bits + (count > 1 ? BitsBelow(count) : 0);
  carries_values = sort_bits <= 32 && item_size <= 4;
  sort_range = carries_values ? BitRange{32, 32 + sort_bits} : BitRange{0, sort_bits};
  sort_status = sort_bits > 63 ? cudaErrorInvalidValue : sort_numbers_workspace_size(total, sort_range, &sort_size);
  sort = workspace.Take<uint8_t>(static_cast<int64_t>(sort_size));
  this->size = workspace.used();
}

template <typename T>
cudaError_t PrepareSelect(const SelectWork& work, std::vector<SelectJob<T>>* jobs, std::vector<unsigned>* blocks) {
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.sort_status);
  int64_t elements = 0;
  int64_t before = 0;
  for (size_t i = 0; i < jobs->size(); ++i) {
    SelectJob<T>& job = (*jobs)[i];
    job.candidates = work.candidates[i];
    job.tag = jobs->size() > 1 ? static_cast<uint64_t>(i) << work.bits : 0;
    job.carries_values = work.carries_values;
    job.kept = work.kept + before;
    job.sorted = work.sorted + before;
    before += job.k;
    elements += job.elements.n;
  }
  unsigned busy = 0;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(BusyBlocksFor(elements, kTile, &busy));
  blocks->clear();
  for (const SelectJob<T>& job : *jobs) {  // divide the blocks that keep the device busy by the size of the data
    const double part = static_cast<double>(job.elements.n) / static_cast<double>(elements);
    const auto fair = static_cast<int64_t>(std::ceil(part * busy));
    blocks->push_back(static_cast<unsigned>(std::min<int64_t>(fair, BlocksFor(job.elements.n, kTile))));
  }
  return cudaSuccess;
}

cudaError_t begin_select_launch(const Batch<SelectJob<float>>& batch, const SelectWork& work, cudaStream_t stream) {
  return Begin(batch, work, stream);
}

cudaError_t cut_select_launch(const Batch<SelectJob<float>>& batch, const SelectWork& work, cudaStream_t stream) {
  return Cut(batch, work, stream);
}

template cudaError_t PrepareSelect(const SelectWork&, std::vector<SelectJob<float>>*, std::vector<unsigned>*);

cudaError_t select_top_k_workspace_size(DType dtype, int64_t n, int64_t k, int64_t* size) {
  const SelectWork work(nullptr, {{n, k}}, ItemSize(dtype));
  *size = work.size;
  return work.sort_status;
}

cudaError_t select_top_k_launch(const Array& values, const SelectParams& params, const SelectOutput& output,
                                void* workspace, cudaStream_t stream) {
  const SelectWork work(workspace, {{values.size, params.k}}, ItemSize(values.dtype));
  return Dispatch(values, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    Elements<T> elements{};
    elements.data = data;
    elements.n = values.size;
    Batch<SelectJob<T>> batch{};
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(PrepareOne(elements, params, output, work, &batch));
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Begin(batch, work, stream));
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(
        Launch(gather_kernel<T>, BlocksFor(values.size, 8 * kThreads), kThreads, stream, batch));
    return Cut(batch, work, stream);
  });
}

}  // namespace hvd_sparse
