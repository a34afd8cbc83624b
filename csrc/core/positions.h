// Where the entries of a payload are: one section, in one of several codings, read into counts and run lengths.
#pragma once

#include <vector>

#include "status.h"

namespace hvd_sparse {

// The numbers stand in the payload header: never change one. kAuto, the smallest of the others, is never written.
enum class Coding : uint8_t { kRunLength = 0, kDense = 1, kEliasFano = 2, kBitmap = 3, kAuto = 255 };

// What kAuto stands for: of equal sizes the first of kDense, kBitmap, kEliasFano. Others as they are.
Coding ResolveCoding(Coding coding, int64_t n, int64_t k);

// In bytes, for 0 < k <= n, and k = n for kDense.
int64_t PositionsSize(Coding coding, int64_t n, int64_t k);

// The entries of each block of 65,536 elements, and the run of zeros before each entry, as run_length.h has them.
struct Positions {
  std::vector<uint32_t> counts;
  std::vector<uint16_t> runs;

  // Where runs are that were read, if they stay where they are; else null: they are in `runs`.
  const uint8_t* in_place = nullptr;

  const void* Runs() const { return in_place != nullptr ? static_cast<const void*>(in_place) : runs.data(); }
};

// Writes PositionsSize bytes, of which all were zero. k or no indices, for which `positions` is the same as run
// lengths.
void WritePositions(Coding coding, const int64_t* indices, int64_t n, int64_t k, const Positions& positions,
                    uint8_t* section);

// Reads `entries`, k or none, from any bytes; CorruptPayload unless they are a coding of so many. Run lengths stay in
// the section, which must outlive the positions.
Status ReadPositions(Coding coding, const uint8_t* section, int64_t n, int64_t k, int64_t entries,
                     Positions* positions);

// The same as ascending indices[entries].
Status ReadIndices(Coding coding, const uint8_t* section, int64_t n, int64_t k, int64_t entries, int64_t* indices);

}  // namespace hvd_sparse
