// What a selection knows while it runs: on the device, so that nothing has to come back between two kernels.
#pragma once

#include <cstdint>

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
  bool finite;                            // what was accumulated, if anything was
  unsigned long long histogram[kDigits];  // of one digit; zero between passes
};

// Elements that reach the bar, in any order.
struct Candidates {
  SelectState* state;  // null: none are gathered
  uint64_t* keys;
  int64_t* indices;
  int64_t capacity;
};

}  // namespace hvd_sparse
