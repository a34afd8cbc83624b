// The positions section of a payload, in one of several codings. Decoding gives counts and run lengths.
#pragma once

#include <cstdint>
#include <vector>

#include "status.h"

namespace hvd_sparse {

// The payload header contains these numbers: never change one. kAuto stands for the smallest and is never written.
enum class Coding : uint8_t { kRunLength = 0, kDense = 1, kEliasFano = 2, kBitmap = 3, kAuto = 255 };

// Resolves kAuto: of codings of equal size the first of kDense, kBitmap, kEliasFano. Returns other codings unchanged.
Coding ResolveCoding(Coding coding, int64_t n, int64_t k);

// Returns the size in bytes, for 0 < k <= n, and k = n for kDense.
int64_t PositionsSize(Coding coding, int64_t n, int64_t k);

// The number of entries in each block of 65,536 elements, and the run of zeros before each entry; see run_length.h.
struct Positions {
  std::vector<uint32_t> counts;
  std::vector<uint16_t> runs;

  // The address of runs that stay in the payload; null if they are in `runs`.
  const uint8_t* in_place = nullptr;

  const void* Runs() const { return in_place != nullptr ? static_cast<const void*>(in_place) : runs.data(); }
};

// Writes PositionsSize bytes, all of which must be zero before the call. `entries` is k or 0; `positions` has the
// indices as run lengths, which only kRunLength reads.
void WritePositions(Coding coding, const int64_t* indices, int64_t entries, int64_t n, int64_t k,
                    const Positions& positions, uint8_t* section);

// Decodes `entries` positions, k or 0. Any bytes are safe; returns CorruptPayload unless they encode this number. Run
// lengths stay in the section, which must outlive the positions.
Status ReadPositions(Coding coding, const uint8_t* section, int64_t n, int64_t k, int64_t entries,
                     Positions* positions);

// The same as ascending indices[entries].
Status ReadIndices(Coding coding, const uint8_t* section, int64_t n, int64_t k, int64_t entries, int64_t* indices);

}  // namespace hvd_sparse
