// Error reporting of the C functions for NumPy. Each function returns 0 on success, 1 for a wrong argument and 2 for a
// damaged payload. On an error it writes the reason to message[kMessageBytes].
#pragma once

#include <algorithm>
#include <cstring>

#include "../core/payload.h"

#define HVD_SPARSE_API extern "C" __attribute__((visibility("default")))

// `hvd_sparse.native` defines a structure with the same layout.
struct HvdSparseForm {
  int64_t n;
  int64_t k;
  int32_t coding;
  int32_t dtype;
  const int64_t* segments;  // pairs of begin and channels
  int64_t segment_count;
};

namespace hvd_sparse {

constexpr size_t kMessageBytes = 512;

inline int Report(const Status& status, char* message) {
  if (status.ok()) return 0;
  const size_t length = std::min(status.message.size(), kMessageBytes - 1);
  std::memcpy(message, status.message.data(), length);
  message[length] = 0;
  return status.kind == StatusKind::kCorruptPayload ? 2 : 1;
}

inline PayloadFormat FormatOf(const HvdSparseForm& form) {
  PayloadFormat format{form.n, form.k, static_cast<Coding>(form.coding), static_cast<DType>(form.dtype), {}};
  for (int64_t s = 0; s < form.segment_count; ++s) {
    format.segments.push_back({form.segments[2 * s], form.segments[2 * s + 1]});
  }
  return format;
}

}  // namespace hvd_sparse
