// The layout of a payload as plain numbers, for kernels.
#pragma once

#include <vector>

#include "../core/payload.h"
#include "../core/payload_sections.h"
#include "batch.h"

namespace hvd_sparse {

// A segment of low-bit values (see core/low_bit.h), and the number of its first channel among all groups.
struct Channels {
  int64_t begin;
  int64_t channels;
  int64_t first;
};

// The part of a plan that kernels use.
struct DevicePlan {
  Header header;  // for k entries, with checksum zero
  Coding coding;  // never kAuto
  DType dtype;    // of the values
  int64_t n;
  int64_t k;
  int64_t size;
  int64_t blocks;   // number of blocks of run lengths
  int64_t full_at;  // offset of the bitmap of full blocks, if has_full
  int64_t runs_at;
  bool has_full;
  int low;              // Elias-Fano: low bits per entry
  int64_t lower_bytes;  // Elias-Fano: bytes of the low bits, at kPositionsAt
  int64_t bits_at;      // offset of the section with one set bit per entry: Elias-Fano's upper section, or a bitmap
  int64_t bits;
  int64_t values_at;
  uint32_t checksum_start;   // remainder ^ checksum_start = checksum
  int code_bits;             // of low-bit values: bits per value, and levels per group; 0 for other types
  int64_t groups;            // number of groups of levels
  int64_t codes_at;          // offset of the codes, after the levels of the largest possible number of groups
  const Channels* segments;  // on the device; null: all elements are one group
  int64_t segment_count;
};

struct PayloadPlan : DevicePlan {
  std::vector<Channels> channels;  // the data that `segments` will point to
};

// Returns InvalidArgument in the same cases as PayloadSize.
Status MakePlan(const PayloadFormat& format, PayloadPlan* plan);

// Sets the groups of low-bit values.
void SetGroups(DType dtype, const Segments& segments, PayloadPlan* plan);

// Returns the plan for kernels. The tables will upload its segments.
inline DevicePlan ForDevice(const PayloadPlan& plan, Tables* tables) {
  DevicePlan result = plan;
  if (plan.channels.empty()) return result;
  result.segments = tables->Add(plan.channels);
  result.segment_count = static_cast<int64_t>(plan.channels.size());
  return result;
}

}  // namespace hvd_sparse
