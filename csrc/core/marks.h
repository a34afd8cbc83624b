// Marks: a bitmap of elements, for example of those that a parameter server's last updates changed. Element i is bit
// i % 64 of word i / 64. There are (n + 63) / 64 words; the unused bits of the last word are zero.
#pragma once

#include <cstdint>
#include <vector>

#include "payload.h"
#include "status.h"

namespace hvd_sparse {

constexpr int64_t kMarkBits = 64;

inline int64_t MarkWords(int64_t n) { return (n + kMarkBits - 1) / kMarkBits; }

// Calls function(i), ascending, for each marked element of [begin, end). It may clear the mark of i.
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

// The same, and calls fetch(i), which prefetches memory, some elements before function(i).
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

// The elements that one update changed: the number of them in each block of 65,536 elements, counts[BlockCount(n)], and
// the place of each in its block.
struct Changed {
  const uint32_t* counts;
  const uint16_t* places;
};

// Marks the elements that updates changed. Existing marks stay; `marked` receives the number of all marks. Returns
// InvalidArgument, and marks nothing, if a place is not below n.
Status MarkUpdates(const std::vector<Changed>& updates, int64_t n, uint64_t* marks, int64_t* marked);

// Sets the clocks, clocks[n], of the elements that an update changed. Returns InvalidArgument as MarkUpdates does, and
// then sets nothing.
Status SetClocks(const Changed& update, int64_t n, uint32_t clock, uint32_t* clocks);

// Marks the elements with a clock above `after`, and clears all other marks; returns the number of marks.
int64_t MarkChangedAfter(const uint32_t* clocks, int64_t n, uint32_t after, uint64_t* marks);

// Packs the marked ones of values[format.n], as Pack does. Returns InvalidArgument unless format.k elements are marked,
// none from format.n on.
Status PackMarked(const PayloadFormat& format, const float* values, const uint64_t* marks, uint8_t* payload);

// Returns the Crc32 of all bytes of a payload with a correct checksum, without reading them.
uint32_t SealedCrc(const uint8_t* payload, int64_t size);

// The elements [begin, end) of the difference minuend - subtrahend.
struct Difference {
  const float* minuend;
  const float* subtrahend;
  int64_t begin;
  int64_t end;
};

// A selection among marked elements.
struct MarkedSelection {
  std::vector<int64_t> indices;  // ascending, counted from `begin`
  std::vector<float> values;     // the differences there
  int64_t reaching = 0;          // number of elements that reach the floor
  double floor = 0;              // for the next selection: if more than 2k reach the old floor, one that 3/2 k reach
  bool has_nan = false;          // whether a marked difference is NaN
};

// Selects the k largest elements of a difference, in the order of SelectTopK, among marked elements whose magnitude
// reaches a floor > 0; all of them if there are fewer. Clears the marks of numbers below the floor. The result is that
// of SelectTopK if at least k elements reach the floor and each of these is marked.
Status SelectMarked(const Difference& difference, int64_t k, uint64_t seed, double floor, uint64_t* marks,
                    MarkedSelection* selected);

// Adds values to subtrahend at indices, then clears the marks of those whose difference is a number below the floor.
// Returns InvalidArgument, and changes nothing, if an index is not in [0, n).
Status AddMarked(const int64_t* indices, const float* values, int64_t count, const float* minuend, double floor,
                 int64_t n, float* subtrahend, uint64_t* marks);

}  // namespace hvd_sparse
