// Sets of elements as bitmaps, "marks": what a parameter server's last updates changed, and what a worker may lack.
// Element i is bit i % 64 of word i / 64; (n + 63) / 64 words, bits from n on are zero.
#pragma once

#include <cstdint>
#include <vector>

#include "payload.h"
#include "status.h"

namespace hvd_sparse {

constexpr int64_t kMarkBits = 64;

inline int64_t MarkWords(int64_t n) { return (n + kMarkBits - 1) / kMarkBits; }

// Calls function(i), ascending, for each marked element of [begin, end). It may take the mark of i away.
template <typename Function>
inline __attribute__((always_inline)) void ForEachMarked(const uint64_t* marks, int64_t begin, int64_t end,
                                                         Function&& function) {
  for (int64_t word = begin / kMarkBits; word * kMarkBits < end; ++word) {
    const int64_t base = word * kMarkBits;
    uint64_t bits = marks[word];
    if (base < begin) bits &= ~uint64_t{0} << (begin - base);
    if (end - base < kMarkBits) bits &= ~(~uint64_t{0} << (end - base));
    for (; bits != 0; bits &= bits - 1) function(base + __builtin_ctzll(bits));
  }
}

// The same; fetch(i), which asks for memory, is called for an element some elements before function(i).
template <typename Fetch, typename Function>
inline __attribute__((always_inline)) void ForEachMarkedAhead(const uint64_t* marks, int64_t begin, int64_t end,
                                                              Fetch&& fetch, Function&& function) {
  constexpr size_t kAhead = 64;
  int64_t ahead[kAhead];
  size_t count = 0;
  ForEachMarked(marks, begin, end, [&](int64_t i) {
    fetch(i);
    int64_t& place = ahead[count % kAhead];
    if (count >= kAhead) function(place);
    place = i;
    ++count;
  });
  for (size_t j = count < kAhead ? 0 : count - kAhead; j < count; ++j) function(ahead[j % kAhead]);
}

int64_t CountMarks(const uint64_t* marks, int64_t words);

// What one update changed: counts[BlockCount(n)], how many elements of each block of 65,536, and the place of each of
// these in its block.
struct Changed {
  const uint32_t* counts;
  const uint16_t* places;
};

// Marks what updates changed, beside what is marked already; returns how many marks there are. InvalidArgument, and
// nothing is marked, if a place is not below n.
Status MarkUpdates(const std::vector<Changed>& updates, int64_t n, uint64_t* marks, int64_t* marked);

// Sets the clocks, of n, of what an update changed. InvalidArgument, and nothing is set, as MarkUpdates.
Status SetClocks(const Changed& update, int64_t n, uint32_t clock, uint32_t* clocks);

// Marks the clocks that are above `after`, and nothing else; returns how many there are.
int64_t MarkChangedAfter(const uint32_t* clocks, int64_t n, uint32_t after, uint64_t* marks);

// Pack of the marked values of values[format.n]: float32, format.k of them. InvalidArgument if there are not as many.
Status PackMarked(const PayloadFormat& format, const float* values, const uint64_t* marks, uint8_t* payload);

// The Crc32 of all bytes of a payload whose checksum is right, without reading them.
uint32_t SealedCrc(const uint8_t* payload, int64_t size);

// Two vectors, float32, whose difference minuend - subtrahend is looked at in [begin, end).
struct Difference {
  const float* minuend;
  const float* subtrahend;
  int64_t begin;
  int64_t end;
};

// What is selected among marked elements.
struct MarkedSelection {
  std::vector<int64_t> indices;  // ascending, counted from `begin`
  std::vector<float> values;     // the differences there
  int64_t reaching = 0;          // how many reach the floor
  double floor = 0;              // to go on with: where more than 2k reach the old one, what 3/2 k do
  bool has_nan = false;          // some marked difference is NaN
};

// The k largest of a difference, in the order of SelectTopK, among marked elements whose magnitude reaches a floor > 0;
// all of these if there are fewer. Takes away the marks of numbers below the floor. So it is the same as SelectTopK if
// at least k reach the floor, and everything that does is marked.
Status SelectMarked(const Difference& difference, int64_t k, uint64_t seed, double floor, uint64_t* marks,
                    MarkedSelection* selected);

// Adds values to subtrahend at indices, and takes away the marks of those whose difference is a number below the floor
// then. InvalidArgument, and nothing is changed, if an index is none of [0, n).
Status AddMarked(const int64_t* indices, const float* values, int64_t count, const float* minuend, double floor,
                 int64_t n, float* subtrahend, uint64_t* marks);

}  // namespace hvd_sparse
