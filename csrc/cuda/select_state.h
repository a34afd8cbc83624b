// The state of a selection. It stays on the device, so that nothing is copied to the host between two kernels.
#pragma once

#include <cstdint>

#include "../core/hint.h"
#include "../core/selection_key.h"

namespace hvd_sparse {

constexpr int kDigits = 1 << kDigitBits;

// The search for a number by its digits, starting with the highest.
struct DigitSearch {
  uint64_t prefix;           // the digits found so far
  unsigned long long rank;   // rank of the number among those that share these digits, from 1
  unsigned long long count;  // how many numbers share these digits
};

struct SelectState {
  uint64_t bar;                           // the smallest magnitude, as bits, of a candidate
  unsigned long long gathered;            // number of elements that reach the bar; may exceed the room
  unsigned long long regathered;          // number of candidates that were gathered later, see radix_select.cuh
  unsigned regather_after;                // the pass that asked for it; 0: none did
  unsigned long long kept;                // number of selected elements that have been written
  DigitSearch key;                        // search for the key of the last selected element
  DigitSearch tie;                        // search for its tie value, if only some elements with this key are selected
  uint64_t wanted;                        // k
  uint64_t seed;                          // of the tie values
  unsigned ticket;                        // number of blocks that have finished a pass
  bool hinted;                            // whether there was a hint
  unsigned long long histogram[kDigits];  // counts of one digit, or tie values; zero between passes
};

// Room for the elements that reach the bar, in any order.
struct CandidateBuffer {
  SelectState* state;  // null: none are gathered
  uint64_t* signed_keys;
  int64_t* indices;
  int64_t capacity;
};

// Elements [begin, begin + size) of a selection.
struct Piece {
  int64_t begin;
  int64_t size;
  const float* data;
};

// The elements to select from: an array, or pieces of float32, which must ascend and not overlap. Elements outside all
// pieces are zero.
template <typename T>
struct Elements {
  const T* data;  // the array; null if there are pieces
  const Piece* pieces;
  int64_t count;
  int64_t n;
};

// One selection of k elements, as a kernel argument.
template <typename T>
struct SelectJob {
  Elements<T> elements;
  CandidateBuffer candidates;
  double threshold;  // the hint; 0 if there is none
  Hint* hint;        // unless null, replaces `threshold` and is updated
  int64_t k;
  uint64_t seed;
  uint64_t tag;            // number of this selection, in the bits above an index: several are sorted together
  bool carries_values;     // whether the lower half of a kept number is the value, the upper half the tagged index
  uint64_t* kept;          // [k]: the selected indices, tagged, in any order
  const uint64_t* sorted;  // [k]: the same, ascending
  int64_t* indices;        // [k]
  T* values;               // [k]
  double* info;
};

}  // namespace hvd_sparse
