// A payload in numbers, as kernels take it.
#pragma once

#include <vector>

#include "../core/layout.h"
#include "../core/payload.h"
#include "batch.h"

namespace hvd_sparse {

// A segment of low-bit values, as core/low_bit.h has them, and its first channel's number among all groups.
struct Channels {
  int64_t begin;
  int64_t channels;
  int64_t first;
};

// What kernels know of it.
struct DevicePlan {
  Header header;  // of k entries, its checksum zero
  Coding coding;  // resolved: none stands for another
  DType dtype;    // of the values
  int64_t n;
  int64_t k;
  int64_t size;
  int64_t blocks;   // of run lengths
  int64_t full_at;  // the bitmap of full blocks, only if has_full
  int64_t runs_at;
  bool has_full;
  int low;              // Elias-Fano's low bits of an entry
  int64_t lower_bytes;  // of all entries, at kPositionsAt
  int64_t bits_at;      // one bit set for each entry: Elias-Fano's upper section, or a bitmap
  int64_t bits;
  int64_t values_at;
  uint32_t checksum_start;   // what joins the remainder of the bytes, to make their checksum
  int code_bits;             // of low-bit values: bits each, and levels a group; 0 of others
  int64_t groups;            // that share levels
  int64_t codes_at;          // behind the levels of as many groups as could be met
  const Channels* segments;  // on the device; null: all elements are one group
  int64_t segment_count;
};

struct PayloadPlan : DevicePlan {
  std::vector<Channels> channels;  // what is to lie at `segments`
};

// InvalidArgument as PayloadSize.
Status MakePlan(const PayloadFormat& format, PayloadPlan* plan);

// The groups of low-bit values.
void SetGroups(DType dtype, const Segments& segments, PayloadPlan* plan);

// The plan for kernels: its segments will be where the tables put them.
inline DevicePlan ForDevice(const PayloadPlan& plan, Tables* tables) {
  DevicePlan result = plan;
  if (plan.channels.empty()) return result;
  result.segments = tables->Add(plan.channels);
  result.segment_count = static_cast<int64_t>(plan.channels.size());
  return result;
}

}  // namespace hvd_sparse
