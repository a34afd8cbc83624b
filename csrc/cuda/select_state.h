// What a selection knows while it runs: on the device, so that nothing has to come back between two kernels.
#pragma once

#include <cstdint>

#include "../core/hint.h"

namespace hvd_sparse {

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;

// The search for a number by its digits, from the highest.
struct DigitSearch {
  uint64_t prefix;           // the digits found so far
  unsigned long long rank;   // which of those that share them is looked for, from 1
  unsigned long long count;  // how many share them
};

struct SelectState {
  uint64_t bar;                           // the smallest magnitude, as bits, of a candidate
  unsigned long long gathered;            // how many elements reach it; more than there was room for, perhaps
  unsigned long long kept;                // how many of the selected have been written
  DigitSearch key;                        // of the last element that is selected
  DigitSearch tie;                        // of that element's tie, looked for only if not all of its key are wanted
  uint64_t wanted;                        // k
  uint64_t seed;                          // of the ties
  unsigned ticket;                        // blocks that are done with a pass
  bool hinted;                            // there was a bar
  unsigned long long histogram[kDigits];  // of one digit; zero between passes
};

// Elements that reach the bar, in any order.
struct Candidates {
  SelectState* state;  // null: none are gathered
  uint64_t* keys;
  int64_t* indices;
  int64_t capacity;
};

// Elements [begin, begin + size) of a selection.
struct Piece {
  int64_t begin;
  int64_t size;
  const float* data;
};

// What is selected from: an array, or pieces of float32 that ascend and do not overlap; what lies in none is zero.
template <typename T>
struct Elements {
  const T* data;  // null: pieces
  const Piece* pieces;
  int64_t count;
  int64_t n;
};

// One selection of k, as kernels take it.
template <typename T>
struct SelectJob {
  Elements<T> elements;
  Candidates candidates;
  double threshold;  // the hint, 0 if there is none
  Hint* hint;        // taken in its place, and updated, unless null
  int64_t k;
  uint64_t seed;
  uint64_t tag;            // of this selection, above the bits of its indices: several are sorted together
  uint64_t* kept;          // k, tagged, in any order
  const uint64_t* sorted;  // the same, ascending
  int64_t* indices;
  T* values;  // may be null
  double* info;
};

}  // namespace hvd_sparse
