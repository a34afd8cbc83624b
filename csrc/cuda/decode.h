// Payloads checked and their positions decoded on a device. Nothing comes back to the host: what fails a check leaves a
// word on the device, and whoever uses the positions looks at it first.
#pragma once

#include <vector>

#include "../core/bucket.h"
#include "batch.h"
#include "plan.h"

namespace hvd_sparse {

// Which check a payload failed, in the order of the core's.
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

// What failed first, by rank and then by check: rank * 256 + check; kNoFailure if nothing did.
constexpr uint32_t kNoFailure = 0xffffffffu;
constexpr uint32_t kChecksEach = 256;
constexpr int64_t kMostRanks = int64_t{1} << 23;

// Where payloads of one plan are decoded to: a row each.
struct DecodeRows {
  uint32_t* failure;  // of them all
  uint32_t* sums;     // [rows], of checksums
  int64_t* entries;   // [rows]: k or 0
  uint32_t* counts;   // [rows, tiles]: entries of each
  int64_t* starts;    // [rows, tiles + 1]: entries before each
  int64_t* indices;   // [rows, k], ascending; null for dense: entry j is element j
  uint32_t* slots;    // [rows, groups + 1], of low-bit values: the groups that hold entries, numbered; null if one
  int64_t tiles;      // what a block decodes: of run lengths a block of elements, else a piece of the bits
};

// The payloads of one selection, and the memory that their entries change.
struct DecodeJob {
  DevicePlan plan;
  const uint8_t* data;  // of the first rank
  int64_t stride;       // to the next rank's
  DecodeRows rows;
  MemorySlice whole;          // of all n elements; unless there are
  const MemorySlice* slices;  // which ascend and do not overlap; null: whole
  int64_t slice_count;
  int64_t rank;  // of `data`
};

// The pieces of a workspace for `rows` payloads of each plan.
struct DecodeWork {
  DecodeWork(void* base, const std::vector<PayloadPlan>& plans, int64_t rows);

  uint32_t* failures;  // one a plan
  uint32_t* sums;
  int64_t sum_count;
  uint32_t* slots;
  int64_t slot_count = 0;
  std::vector<DecodeRows> each;
  bool has_runs = false;  // of any: what they need is launched
  bool has_bits = false;
  bool has_low = false;
  int64_t size;
};

// How many blocks a job is worth.
unsigned BlocksOf(const DecodeJob& job);

// Says that nothing has failed yet: before the first decode_launch.
cudaError_t begin_decode_launch(const DecodeWork& work, cudaStream_t stream);

// Checks the payloads of `count` <= kLargestGridHeight ranks from `first` on, and decodes their positions.
cudaError_t decode_launch(const Batch<DecodeJob>& batch, int64_t first, int64_t count, const DecodeWork& work,
                          cudaStream_t stream);

}  // namespace hvd_sparse
