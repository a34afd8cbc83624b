// Finds the k-th element of a total order by radix selection: digit by digit of its key and, if only some of the
// elements with this key are selected and these are many, of its tie value. In each pass the blocks count one digit of
// the elements that share the digits found before, and the last block determines this digit.
//
// The passes read the candidates. If the hint gathered too few of them, or more than there is room for, the first
// passes read all elements. Their digits are a lower bound of the key; as soon as there is room for all elements that
// reach it, these are gathered as candidates for the other passes.
#pragma once

#include <cub/block/block_scan.cuh>

#include "batch.cuh"
#include "gather.cuh"

namespace hvd_sparse {

constexpr int kTileEach = 8;                              // elements of a tile for each thread
constexpr int64_t kTile = int64_t{kTileEach} * kThreads;  // fewest elements for which another block pays off
constexpr int kTieBits = 64;
constexpr Count kFewTies = kThreads;  // elements with the last key that are ranked at once, a thread each

__device__ inline bool Fits(Count count, const SelectState& state, const CandidateBuffer& candidates) {
  return count >= state.wanted && count <= static_cast<Count>(candidates.capacity);
}

// A block's share of the elements that a selection reads: all elements, or its candidates.
template <typename T>
class SelectSource {
 public:
  __device__ explicit SelectSource(const Share<SelectJob<T>>& share)
      : share_(share), size_(share.job.elements.n), reads_all_(false) {
    const SelectState& state = *share.job.candidates.state;
    if (Fits(state.gathered, state, share.job.candidates)) {
      size_ = static_cast<int64_t>(state.gathered);
    } else if (state.regather_after != 0) {
      size_ = static_cast<int64_t>(state.regathered);
    } else {
      reads_all_ = true;
    }
  }

  // Calls see(signed key, index) for each element, and see(any, -1) beyond the end: all threads call it the same number
  // of times. They call end_tile() after each tile. Without kNeedsIndex, the second argument is a place for IndexAt.
  template <bool kNeedsIndex, typename See, typename EndTile>
  __device__ void ForTiles(const See& see, const EndTile& end_tile) const {
    if (reads_all_) {
      ForAll(share_, see, end_tile);
      return;
    }
    const CandidateBuffer& candidates = share_.job.candidates;
    const auto both = [&](int64_t i) { return Candidate{candidates.signed_keys[i], candidates.indices[i]}; };
    const auto see_both = [&](const Candidate& one, int64_t i) { see(one.signed_key, i < 0 ? -1 : one.index); };
    if (kNeedsIndex) {
      ForEach(share_, size_, both, see_both, end_tile);
    } else {
      ForEach(share_, size_, [&](int64_t i) { return candidates.signed_keys[i]; }, see, end_tile);
    }
  }

  __device__ int64_t IndexAt(int64_t place) const { return reads_all_ ? place : share_.job.candidates.indices[place]; }

  // As ForTiles, for all elements.
  template <typename See, typename EndTile>
  __device__ static void ForAll(const Share<SelectJob<T>>& share, const See& see, const EndTile& end_tile) {
    const Elements<T>& elements = share.job.elements;
    const auto see_value = [&](T value, int64_t i) { see(SignedKey(value), i); };
    if (elements.data != nullptr) {
      const T* data = elements.data;
      ForEach(share, elements.n, [data](int64_t i) { return data[i]; }, see_value, end_tile);
    } else {
      Reader<T> reader(elements);
      ForEach(share, elements.n, [&](int64_t i) { return reader.At(i); }, see_value, end_tile);
    }
  }

 private:
  // Reads all items of a tile before it uses the first one.
  template <typename Get, typename Use, typename EndTile>
  __device__ static void ForEach(const Share<SelectJob<T>>& share, int64_t size, const Get& get, const Use& use,
                                 const EndTile& end_tile) {
    using Item = decltype(get(int64_t{}));
    for (int64_t tile = share.block * kTile; tile < size; tile += share.blocks * kTile) {
      const int64_t first = tile + threadIdx.x;
      Item items[kTileEach];
#pragma unroll
      for (int e = 0; e < kTileEach; ++e) items[e] = first + e * kThreads < size ? get(first + e * kThreads) : Item{};
#pragma unroll
      for (int e = 0; e < kTileEach; ++e) use(items[e], first + e * kThreads < size ? first + e * kThreads : -1);
      end_tile();
    }
  }

  const Share<SelectJob<T>>& share_;
  int64_t size_;
  bool reads_all_;
};

// One digit of a number: bits [shift, shift + bits).
struct Digit {
  int shift;
  int bits;

  __device__ int Of(uint64_t number) const { return static_cast<int>((number >> shift) & ((1u << bits) - 1u)); }
  __device__ uint64_t Above(uint64_t number) const { return number >> (shift + bits - 1) >> 1; }
};

// Returns a number for the pass that finds a digit; not zero.
HVD_SPARSE_HD inline unsigned PassOf(const Digit& digit) { return static_cast<unsigned>(digit.shift) + 1; }

// Returns the digit below another one; of width 0 if there is none.
HVD_SPARSE_HD inline Digit Below(const Digit& digit) {
  const int bits = digit.shift < kDigitBits ? digit.shift : kDigitBits;
  return {digit.shift - bits, bits};
}

// Returns the highest digit of numbers with `bits` bits.
HVD_SPARSE_HD inline Digit Highest(int bits) { return Below({bits, 0}); }

// The last block's part of a pass: finds the digit of the element with the wanted rank. Rank 1 is the largest key, or
// the smallest tie value.
template <bool kTies>
__device__ void FindDigit(const CandidateBuffer& candidates, const Digit& digit_of) {
  constexpr int kEach = kDigits / kThreads;
  using Scan = cub::BlockScan<Count, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  SelectState* state = candidates.state;
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
    search->prefix |= static_cast<uint64_t>(digit) << digit_of.shift;
    search->rank = rank - before;
    search->count = counts[e];
    if (kTies) continue;
    if (digit_of.shift == 0) {
      state->tie.rank = rank - before;
      continue;
    }
    const Count reaching = state->wanted - search->rank + search->count;
    const bool has_candidates = Fits(state->gathered, *state, candidates) || state->regather_after != 0;
    if (!has_candidates && Fits(reaching, *state, candidates)) state->regather_after = PassOf(digit_of);
  }
  if (threadIdx.x == 0) state->ticket = 0;
}

// Finds the last selected tie value among at most kFewTies: the blocks list them, and the last block ranks them.
template <typename T>
__device__ void FindFewTies(const Share<SelectJob<T>>& share) {
  __shared__ Count ties[kFewTies];
  SelectState* state = share.job.candidates.state;
  const uint64_t last_key = state->key.prefix;
  const SelectSource<T> source(share);
  source.template ForTiles<false>(
      [&](uint64_t signed_key, int64_t place) {
        if (place < 0 || KeyOf(signed_key) != last_key) return;
        const uint64_t tie = TieKey(last_key, state->seed, source.IndexAt(place));
        state->histogram[atomicAdd(&state->tie.count, Count{1})] = tie;
      },
      [] {});
  if (!IsLastBlock(&state->ticket, share.blocks)) return;
  const auto count = static_cast<unsigned>(state->key.count);
  const unsigned own = threadIdx.x;
  if (own < count) ties[own] = __ldcg(&state->histogram[own]);
  __syncthreads();
  if (own == 0) state->ticket = 0;
  if (own >= count) return;
  Count below = 0;
  Count reaching = 0;
  for (unsigned other = 0; other < count; ++other) {
    below += ties[other] < ties[own] ? 1 : 0;
    reaching += ties[other] <= ties[own] ? 1 : 0;
  }
  if (below < state->tie.rank && state->tie.rank <= reaching) state->tie.prefix = ties[own];
  state->histogram[own] = 0;
}

template <typename T, bool kTies>
__global__ void __launch_bounds__(kThreads) count_digits_kernel(Batch<SelectJob<T>> batch, Digit digit_of) {
  __shared__ unsigned counts[kDigits];
  const Share<SelectJob<T>> share = ShareOf(batch);
  SelectState* state = share.job.candidates.state;
  const uint64_t last_key = state->key.prefix;
  if (kTies && state->key.count == state->key.rank) return;  // all elements with this key are selected
  if (kTies && state->key.count <= kFewTies) {
    if (digit_of.shift + digit_of.bits == kTieBits) FindFewTies(share);
    return;
  }
  // The tie value of a zero is its index: the digits above the highest index are zero.
  if (kTies && last_key <= kZeroKey && (share.job.elements.n - 1) >> digit_of.shift == 0) return;
  const uint64_t above = digit_of.Above(kTies ? state->tie.prefix : last_key);
  const SelectSource<T> source(share);
  for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads) counts[digit] = 0;
  __syncthreads();
  source.template ForTiles<kTies>(
      [&](uint64_t signed_key, int64_t index) {
        const uint64_t key = KeyOf(signed_key);
        if (index < 0 || (kTies && key != last_key)) return;
        const uint64_t number = kTies ? TieKey(key, state->seed, index) : key;
        if (digit_of.Above(number) == above) atomicAdd(&counts[digit_of.Of(number)], 1u);
      },
      [] {});
  __syncthreads();
  for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads) {
    if (counts[digit] != 0) atomicAdd(&state->histogram[digit], static_cast<Count>(counts[digit]));
  }
  if (IsLastBlock(&state->ticket, share.blocks)) FindDigit<kTies>(share.job.candidates, digit_of);
}

// Gathers the elements that reach the digits found so far as candidates, if the pass that found the last digit asked
// for it.
template <typename T>
__global__ void __launch_bounds__(kThreads) regather_kernel(Batch<SelectJob<T>> batch, unsigned pass) {
  __shared__ CollectedCandidates collected;
  const Share<SelectJob<T>> share = ShareOf(batch);
  const CandidateBuffer& candidates = share.job.candidates;
  SelectState* state = candidates.state;
  if (state->regather_after != pass) return;
  const uint64_t bar = state->key.prefix;
  const WriteCandidate write{candidates};
  collected.Begin();
  SelectSource<T>::ForAll(
      share,
      [&](uint64_t signed_key, int64_t index) {
        const bool reaches = index >= 0 && KeyOf(signed_key) >= bar;
        collected.Add(reaches, Candidate{signed_key, index}, &state->regathered, write);
      },
      [] {});
  collected.Flush(&state->regathered, kThreads, write);
}

template <typename T>
cudaError_t FindKey(const Batch<SelectJob<T>>& batch, cudaStream_t stream) {
  constexpr int kBits = 8 * static_cast<int>(sizeof(T)) - 1;  // infinity + 1 has one bit less than the type
  for (Digit digit = Highest(kBits); digit.bits > 0; digit = Below(digit)) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(
        Launch(count_digits_kernel<T, false>, batch.blocks, kThreads, stream, batch, digit));
    if (digit.shift == 0) continue;
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(regather_kernel<T>, batch.blocks, kThreads, stream, batch, PassOf(digit)));
  }
  return cudaSuccess;
}

template <typename T>
cudaError_t FindTie(const Batch<SelectJob<T>>& batch, cudaStream_t stream) {
  for (Digit digit = Highest(kTieBits); digit.bits > 0; digit = Below(digit)) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(Launch(count_digits_kernel<T, true>, batch.blocks, kThreads, stream, batch, digit));
  }
  return cudaSuccess;
}

// Returns whether an element of the source is among the first `wanted` elements of the order.
__device__ inline bool IsSelected(const SelectState& state, uint64_t key, int64_t index) {
  if (key != state.key.prefix) return key > state.key.prefix;
  return state.key.count == state.key.rank || TieKey(key, state.seed, index) <= state.tie.prefix;
}

// Writes the tagged indices of the selected elements, or these and the values, in any order.
template <typename T>
__global__ void __launch_bounds__(kThreads) keep_kernel(Batch<SelectJob<T>> batch) {
  __shared__ Collected<uint64_t, kTile> collected;
  const Share<SelectJob<T>> share = ShareOf(batch);
  SelectState* state = share.job.candidates.state;
  const SelectSource<T> source(share);
  const auto write = [&](int64_t slot, uint64_t number) {
    if (slot < share.job.k) share.job.kept[slot] = number;
  };
  collected.Begin();
  source.template ForTiles<true>(
      [&](uint64_t signed_key, int64_t index) {
        const bool is_selected = index >= 0 && IsSelected(*state, KeyOf(signed_key), index);
        const uint64_t tagged = share.job.tag | static_cast<uint64_t>(index);
        const uint64_t number = share.job.carries_values ? tagged << 32 | ValueBitsOf<T>(signed_key) : tagged;
        collected.Add(is_selected, number, &state->kept, write);
      },
      [&] {
        collected.Flush(&state->kept, kThreads, write);
        __syncthreads();
        collected.Begin();
      });
}

}  // namespace hvd_sparse
