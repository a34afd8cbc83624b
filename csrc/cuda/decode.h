// Validates payloads and decodes their positions on a device. Nothing is copied to the host: a failed check sets a word
// on the device, which kernels must read before they use the positions.
#pragma once

#include <vector>

#include "../core/bucket.h"
#include "batch.h"
#include "plan.h"

namespace hvd_sparse {

// The check that a payload failed, in the order of the core's checks.
enum class PayloadCheck : uint32_t {
  kMagic = 1,
  kVersion,
  kCoding,
  kValueType,
  kReserved,
  kElements,
  kEntries,
  kChecksum,
  kPositions,
};

// The first failure, ordered by rank and then by check: rank * 256 + check. kNoFailure if all checks passed.
constexpr uint32_t kNoFailure = 0xffffffffu;
constexpr uint32_t kChecksEach = 256;
static_assert(kMostRanks * kChecksEach - 1 < kNoFailure);

constexpr int kSpan = 8192;  // elements whose sums a thread block forms in shared memory

HVD_SPARSE_HD inline int64_t SpansOf(int64_t n) { return (n + kSpan - 1) / kSpan; }

// The outputs of decoding payloads with the same plan, one row for each payload.
struct DecodeRows {
  uint32_t* failure;  // the first failure in all rows
  uint32_t* sums;     // [rows]: remainders of the checksums
  int64_t* entries;   // [rows]: k or 0
  uint32_t* counts;   // [rows, tiles]: number of entries in each tile
  int64_t* starts;    // [rows, tiles + 1]: number of entries before each tile
  int64_t* indices;   // [rows, k], ascending; null for dense: entry j is element j
  uint32_t* slots;    // [rows, groups + 1], for low-bit values: see groups.cuh; null if there is one group
  int64_t* spans;     // [rows, spans + 1], if sums are wanted: number of entries before each span of kSpan elements
  int64_t tiles;      // a thread block decodes a tile: for run lengths a block of elements, else a section of the bits
};

// The payloads of one selection, and the outputs that their entries change.
struct DecodeJob {
  DevicePlan plan;
  const uint8_t* data;  // payload of the first rank
  int64_t stride;       // bytes from one rank's payload to the next
  DecodeRows rows;
  FeedbackSlice whole;          // the output of all n elements, used if `slices` is null
  const FeedbackSlice* slices;  // the outputs of parts, which ascend and do not overlap
  int64_t slice_count;
  int64_t rank;  // of the payload at `data`
};

// The arrays of a workspace for `rows` payloads of each plan.
struct DecodeWork {
  DecodeWork(void* base, const std::vector<PayloadPlan>& plans, int64_t rows, bool has_spans = false);

  uint32_t* failures;  // one for each plan
  uint32_t* sums;
  int64_t sum_count;
  uint32_t* slots;
  int64_t slot_count = 0;
  int64_t most_tiles = 0;  // of any plan
  std::vector<DecodeRows> each;
  bool has_runs = false;  // whether any plan needs the kernels of this coding
  bool has_bits = false;
  bool has_low = false;
  int64_t size;
};

// Returns the number of blocks for decoding a job.
unsigned BlocksOf(const DecodeJob& job);

// Resets the failures. Must be called before the first decode_launch.
cudaError_t begin_decode_launch(const DecodeWork& work, cudaStream_t stream);

// Validates the payloads of ranks [first, first + count) and decodes their positions. count <= kLargestGridHeight.
cudaError_t decode_launch(const Batch<DecodeJob>& batch, int64_t first, int64_t count, const DecodeWork& work,
                          cudaStream_t stream);

}  // namespace hvd_sparse
