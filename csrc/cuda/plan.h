// A payload in numbers, as kernels take it.
#pragma once

#include "../core/layout.h"
#include "../core/payload.h"
#include "launch.h"

namespace hvd_sparse {

struct PayloadPlan {
  Header header;  // of k entries, its checksum zero
  Coding coding;  // resolved: none stands for another
  DType dtype;    // of the values; none of less than a byte
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
  uint32_t checksum_start;  // what joins the remainder of the bytes, to make their checksum
};

// InvalidArgument as PayloadSize, and for values of less than a byte, which no kernel knows.
Status MakePlan(const PayloadFormat& format, PayloadPlan* plan);

}  // namespace hvd_sparse
