// The k-th largest of a total order, by the digits of its key and, if not all that have this key are wanted, by the
// digits of its tie. A pass counts one digit of what shares the digits found before; its last block finds the next.
#pragma once

#include <cub/block/block_scan.cuh>

#include "gather.cuh"
#include "launch.h"

namespace hvd_sparse {

// What a selection reads: the candidates if these are enough and had room, otherwise all elements.
template <typename T>
struct SelectSource {
  const T* data;
  int64_t n;
  Candidates candidates;

  __device__ bool ReadsAll() const {
    const SelectState& state = *candidates.state;
    return state.gathered < state.wanted || state.gathered > static_cast<uint64_t>(candidates.capacity);
  }
  __device__ int64_t Size(bool reads_all) const {
    return reads_all ? n : static_cast<int64_t>(candidates.state->gathered);
  }
  __device__ uint64_t Key(bool reads_all, int64_t i) const {
    return reads_all ? SelectionKey(data[i]) : candidates.keys[i];
  }
  __device__ int64_t Index(bool reads_all, int64_t i) const { return reads_all ? i : candidates.indices[i]; }
};

constexpr int64_t kTile = 2048;  // elements that are worth a block

// The last block's part of a pass: finds the digit of the rank-th, from the largest for keys, the smallest for ties.
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
  __syncthreads();  // all have read the rank
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
__global__ void __launch_bounds__(kThreads) count_digits_kernel(SelectSource<T> source, int shift) {
  __shared__ unsigned counts[kDigits];
  SelectState* state = source.candidates.state;
  const uint64_t last_key = state->key.prefix;
  if (kTies && state->key.count == state->key.rank) return;  // all of them are wanted: there is no tie to break
  const uint64_t above = (kTies ? state->tie.prefix : last_key) >> shift >> kDigitBits;
  const bool reads_all = source.ReadsAll();
  const int64_t size = source.Size(reads_all);
  for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads) counts[digit] = 0;
  __syncthreads();
  for (int64_t tile = int64_t{blockIdx.x} * kTile; tile < size; tile += int64_t{gridDim.x} * kTile) {
    const int64_t end = tile + kTile < size ? tile + kTile : size;
    for (int64_t i = tile + threadIdx.x; i < end; i += kThreads) {
      uint64_t key = source.Key(reads_all, i);
      if (kTies && key != last_key) continue;
      if (kTies) key = TieKey(key, state->seed, source.Index(reads_all, i));
      if ((key >> shift >> kDigitBits) == above) atomicAdd(&counts[(key >> shift) & (kDigits - 1)], 1u);
    }
  }
  __syncthreads();
  for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads) {
    if (counts[digit] != 0) atomicAdd(&state->histogram[digit], static_cast<Count>(counts[digit]));
  }
  if (IsLastBlock(&state->ticket)) FindDigit<kTies>(state, shift);
}

// The shift of the highest digit of numbers of so many bits.
constexpr int HighestShift(int bits) { return (bits - 1) / kDigitBits * kDigitBits; }

template <typename T>
cudaError_t FindKey(const SelectSource<T>& source, cudaStream_t stream) {
  unsigned blocks = 0;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(BusyBlocksFor(source.n, kTile, &blocks));
  for (int shift = HighestShift(8 * sizeof(T)); shift >= 0; shift -= kDigitBits) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(count_digits_kernel<T, false>, blocks, kThreads, stream, source, shift));
  }
  return cudaSuccess;
}

template <typename T>
cudaError_t FindTie(const SelectSource<T>& source, cudaStream_t stream) {
  unsigned blocks = 0;
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(BusyBlocksFor(source.n, kTile, &blocks));
  for (int shift = HighestShift(64); shift >= 0; shift -= kDigitBits) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(count_digits_kernel<T, true>, blocks, kThreads, stream, source, shift));
  }
  return cudaSuccess;
}

// Whether element i, one of the source, is among the first `wanted`.
__device__ inline bool IsSelected(const SelectState& state, uint64_t key, int64_t index) {
  if (key != state.key.prefix) return key > state.key.prefix;
  return state.key.count == state.key.rank || TieKey(key, state.seed, index) <= state.tie.prefix;
}

// Writes the index of everything that is selected, in any order.
template <typename T>
__global__ void __launch_bounds__(kThreads) keep_kernel(SelectSource<T> source, int64_t* indices) {
  SelectState* state = source.candidates.state;
  const bool reads_all = source.ReadsAll();
  const int64_t size = source.Size(reads_all);
  for (int64_t base = int64_t{blockIdx.x} * kThreads; base < size; base += int64_t{gridDim.x} * kThreads) {
    const int64_t i = base + threadIdx.x;
    const int64_t index = i < size ? source.Index(reads_all, i) : 0;
    const bool selected = i < size && IsSelected(*state, source.Key(reads_all, i), index);
    const int64_t slot = TakeSlot(selected, &state->kept);
    if (slot >= 0 && slot < static_cast<int64_t>(state->wanted)) indices[slot] = index;
  }
}

}  // namespace hvd_sparse
