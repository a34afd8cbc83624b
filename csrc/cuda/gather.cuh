// Gathers the candidates of a selection in one pass over the data.
#pragma once

#include <cstring>
#include <type_traits>

#include "../core/selection_key.h"
#include "select_state.h"
#include "warp.cuh"

namespace hvd_sparse {

// Returns whether a value reaches the bar. If the bar is above infinity, no value does. NaN never reaches a bar.
template <typename T>
__device__ inline bool ReachesBar(T value, uint64_t bar) {
  const uint64_t magnitude = MagnitudeBits(value);
  constexpr uint64_t kInfinity = kInfinityBits<T>;
  return magnitude >= bar && magnitude <= kInfinity;
}

// Returns the selection key and, in its highest bit, the sign: all of a value except the bits of a NaN.
template <typename T>
__device__ inline uint64_t SignedKey(T value) {
  BitsOf<T> bits;
  std::memcpy(&bits, &value, sizeof bits);
  return SelectionKey(value) | static_cast<uint64_t>(bits) >> (8 * sizeof(T) - 1) << 63;
}

__device__ inline uint64_t KeyOf(uint64_t signed_key) { return signed_key & ~(uint64_t{1} << 63); }

// Returns the bits of the value with this key.
template <typename T>
__device__ inline uint64_t ValueBitsOf(uint64_t signed_key) {
  constexpr uint64_t kInfinity = kInfinityBits<T>;
  constexpr uint64_t kNan = kInfinity | kInfinity >> 1;
  const uint64_t key = KeyOf(signed_key);
  return (key == kNanKey ? kNan : key - 1) | signed_key >> 63 << (8 * sizeof(T) - 1);
}

struct Candidate {
  uint64_t signed_key;
  int64_t index;
};

// Writes a candidate if there is room.
struct WriteCandidate {
  const CandidateBuffer& to;

  __device__ void operator()(int64_t slot, const Candidate& candidate) const {
    if (slot >= to.capacity) return;
    to.signed_keys[slot] = candidate.signed_key;
    to.indices[slot] = candidate.index;
  }
};

using CollectedCandidates = Collected<Candidate, 1024>;

// Returns the first of ascending pieces that ends after an element.
template <typename P>
__device__ inline int64_t FirstBeyond(const P* pieces, int64_t count, int64_t element) {
  int64_t low = 0;
  int64_t high = count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (pieces[middle].begin + pieces[middle].size <= element) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Finds the pieces of ascending elements.
template <typename P>
class PieceFinder {
 public:
  __device__ PieceFinder(const P* pieces, int64_t count) : pieces_(pieces), count_(count) {}

  // Returns null if no piece contains the element.
  __device__ const P* Find(int64_t element) {
    if (at_ < 0) at_ = FirstBeyond(pieces_, count_, element);
    while (at_ < count_ && pieces_[at_].begin + pieces_[at_].size <= element) ++at_;
    return at_ < count_ && pieces_[at_].begin <= element ? &pieces_[at_] : nullptr;
  }

 private:
  const P* pieces_;
  int64_t count_;
  int64_t at_ = -1;
};

// Reads elements in ascending order.
template <typename T>
class Reader {
 public:
  __device__ explicit Reader(const Elements<T>& elements)
      : data_(elements.data), finder_(elements.pieces, elements.count) {}

  __device__ T At(int64_t i) {
    if constexpr (std::is_same_v<T, float>) {
      if (data_ == nullptr) {
        const Piece* piece = finder_.Find(i);
        return piece != nullptr ? piece->data[i - piece->begin] : 0.0f;
      }
    }
    return data_[i];
  }

 private:
  const T* data_;
  PieceFinder<Piece> finder_;
};

}  // namespace hvd_sparse
