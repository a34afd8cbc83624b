// Payloads checked and their positions decoded on a device. Nothing comes back to the host: what fails a check leaves a
// word on the device, and whoever uses the positions looks at it first.
#pragma once

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

// Payloads of one plan, one after the other at equal distances, from rank `first` on.
struct Payloads {
  const uint8_t* data;
  int64_t stride;
  int64_t first;
  int64_t count;
};

// The pieces of a workspace for `count` payloads.
struct DecodeWork {
  DecodeWork(void* base, const PayloadPlan& plan, int64_t count);

  uint32_t* failure;
  uint32_t* sums;    // [count], of checksums
  int64_t* entries;  // [count]: k or 0
  uint32_t* counts;  // [count, tiles]: entries of each
  int64_t* starts;   // [count, tiles + 1]: entries before each
  int64_t* indices;  // [count, k], ascending; null for dense: entry j is element j
  int64_t tiles;     // what a block decodes: of run lengths a block of elements, else a piece of the bits
  int64_t size;
};

// Says that nothing has failed yet: before the first decode_launch.
cudaError_t begin_decode_launch(const DecodeWork& work, cudaStream_t stream);

// Checks payloads.count <= kLargestGridHeight payloads and decodes their positions.
cudaError_t decode_launch(const PayloadPlan& plan, const Payloads& payloads, const DecodeWork& work,
                          cudaStream_t stream);

}  // namespace hvd_sparse
