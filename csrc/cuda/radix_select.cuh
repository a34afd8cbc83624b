// Finds the k-th element of a total order by radix selection: digit by digit of its key and, if only some of the
// elements with this key are selected, of its tie value. In each pass the blocks count one digit of the elements that
// share the digits found before, and the last block determines this digit.
#pragma once

#include <cub/block/block_scan.cuh>

#include "batch.cuh"
#include "gather.cuh"

namespace hvd_sparse {

// The elements that a selection reads: the candidates if there are enough of them and they had room, else all elements.
// Calls must ask for ascending places.
template <typename T>
class SelectSource {
 public:
  __device__ explicit SelectSource(const SelectJob<T>& job)
      : candidates_(job.candidates), reader_(job.elements), n_(job.elements.n) {
    const SelectState& state = *candidates_.state;
    reads_all_ = state.gathered < state.wanted || state.gathered > static_cast<uint64_t>(candidates_.capacity);
  }
  __device__ int64_t Size() const { return reads_all_ ? n_ : static_cast<int64_t>(candidates_.state->gathered); }
  __device__ uint64_t Key(int64_t i) { return reads_all_ ? SelectionKey(reader_.At(i)) : candidates_.keys[i]; }
  __device__ int64_t Index(int64_t i) const { return reads_all_ ? i : candidates_.indices[i]; }

 private:
  Candidates candidates_;
  Reader<T> reader_;
  int64_t n_;
  bool reads_all_;
};

constexpr int64_t kTile = 2048;  // smallest number of elements for which another block pays off

// The last block's part of a pass: finds the digit of the element with the wanted rank. Rank 1 is the largest key, or
// the smallest tie value.
template <bool kTies>
__device__ void FindDigit(SelectState* state, int shift) {
  constexpr int kEach = kDigits / kThreads;
  using Scan = cub::BlockScan<Count, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  DigitSearch* search = kTies ? &state->tie : &state->key;
  const Count rank = search->rank;
  Count counts[kEach];
  Count sum = 0;
  for (int e = 0; e < kEach; ++e) {
    const int place = static_cast<int>(threadIdx.x) * kEach + e;
    counts[e] = __ldcg(&state->histogram[kTies ? place : kDigits - 1 - place]);
    sum += counts[e];
  }
  Count before = 0;
  Scan(storage).ExclusiveSum(sum, before);
  __syncthreads();  // all threads have read the rank
  for (int e = 0; e < kEach; ++e, before += counts[e - 1]) {
    const int place = static_cast<int>(threadIdx.x) * kEach + e;
    const int digit = kTies ? place : kDigits - 1 - place;
    state->histogram[digit] = 0;
    if (before >= rank || rank > before + counts[e]) continue;
    search->prefix |= static_cast<uint64_t>(digit) << shift;
    search->rank = rank - before;
    search->count = counts[e];
    if (!kTies && shift == 0) state->tie.rank = rank - before;
  }
  if (threadIdx.x == 0) state->ticket = 0;
}

template <typename T, bool kTies>
__global__ void __launch_bounds__(kThreads) count_digits_kernel(Batch<SelectJob<T>> batch, int shift) {
  __shared__ unsigned counts[kDigits];
  const Share<SelectJob<T>> share = ShareOf(batch);
  SelectState* state = share.job.candidates.state;
  const uint64_t last_key = state->key.prefix;
  if (kTies && state->key.count == state->key.rank) return;  // all elements with this key are selected
  const uint64_t above = (kTies ? state->tie.prefix : last_key) >> shift >> kDigitBits;
  SelectSource<T> source(share.job);
  const int64_t size = source.Size();
  for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads) counts[digit] = 0;
  __syncthreads();
  for (int64_t tile = share.block * kTile; tile < size; tile += share.blocks * kTile) {
    const int64_t end = tile + kTile < size ? tile + kTile : size;
    for (int64_t i = tile + threadIdx.x; i < end; i += kThreads) {
      uint64_t key = source.Key(i);
      if (kTies && key != last_key) continue;
      if (kTies) key = TieKey(key, state->seed, source.Index(i));
      if ((key >> shift >> kDigitBits) == above) atomicAdd(&counts[(key >> shift) & (kDigits - 1)], 1u);
    }
  }
  __syncthreads();
  for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads) {
    if (counts[digit] != 0) atomicAdd(&state->histogram[digit], static_cast<Count>(counts[digit]));
  }
  if (IsLastBlock(&state->ticket, share.blocks)) FindDigit<kTies>(state, shift);
}

// Returns the shift of the highest digit of numbers with `bits` bits.
HVD_SPARSE_HD constexpr int HighestShift(int bits) { return (bits - 1) / kDigitBits * kDigitBits; }

template <typename T>
cudaError_t FindKey(const Batch<SelectJob<T>>& batch, cudaStream_t stream) {
  for (int shift = HighestShift(8 * sizeof(T)); shift >= 0; shift -= kDigitBits) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(
        Launch(count_digits_kernel<T, false>, batch.blocks, kThreads, stream, batch, shift));
  }
  return cudaSuccess;
}

template <typename T>
cudaError_t FindTie(const Batch<SelectJob<T>>& batch, cudaStream_t stream) {
  for (int shift = HighestShift(64); shift >= 0; shift -= kDigitBits) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(count_digits_kernel<T, true>, batch.blocks, kThreads, stream, batch, shift));
  }
  return cudaSuccess;
}

// Returns whether an element of the source is among the first `wanted` elements of the order.
__device__ inline bool IsSelected(const SelectState& state, uint64_t key, int64_t index) {
  if (key != state.key.prefix) return key > state.key.prefix;
  return state.key.count == state.key.rank || TieKey(key, state.seed, index) <= state.tie.prefix;
}

// Writes the tagged indices of the selected elements, in any order.
template <typename T>
__global__ void __launch_bounds__(kThreads) keep_kernel(Batch<SelectJob<T>> batch) {
  const Share<SelectJob<T>> share = ShareOf(batch);
  SelectState* state = share.job.candidates.state;
  SelectSource<T> source(share.job);
  const int64_t size = source.Size();
  for (int64_t base = int64_t{share.block} * kThreads; base < size; base += int64_t{share.blocks} * kThreads) {
    const int64_t i = base + threadIdx.x;
    const int64_t index = i < size ? source.Index(i) : 0;
    const bool selected = i < size && IsSelected(*state, source.Key(i), index);
    const int64_t slot = TakeSlot(selected, &state->kept);
    if (slot >= 0 && slot < share.job.k) share.job.kept[slot] = share.job.tag | static_cast<uint64_t>(index);
  }
}

}  // namespace hvd_sparse
