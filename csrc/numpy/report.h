// Error reporting of the C functions for NumPy. Each function returns 0 on success, 1 for a wrong argument, 2 for a
// damaged payload, 3 for want of memory and 4 for any other exception. On an error it writes the reason to
// message[kMessageBytes].
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "../core/denormals.h"
#include "../core/payload.h"
#include "../core/select.h"

#define HVD_SPARSE_API extern "C" __attribute__((visibility("default")))

// `hvd_sparse.native_call` defines a structure with the same layout; tests/single/test_native_structures.py compares
// them.
struct HvdSparseForm {
  int64_t n;
  int64_t k;
  int32_t coding;
  int32_t dtype;
  const int64_t* segments;  // pairs of begin and channels
  int64_t segment_count;
};
static_assert(sizeof(HvdSparseForm) == 40 && offsetof(HvdSparseForm, segment_count) == 32);

namespace hvd_sparse {

constexpr size_t kMessageBytes = 512;

inline void WriteMessage(const char* text, char* message) noexcept {
  const size_t length = std::min(std::strlen(text), kMessageBytes - 1);
  std::memcpy(message, text, length);
  message[length] = 0;
}

// Returns what a C function returns, for a body that returns a Status. An exception must not leave the function.
template <typename Body>
int Guarded(char* message, const Body& body) noexcept {
  const KeepDenormals keep;
  try {
    const Status status = body();
    if (status.ok()) return 0;
    WriteMessage(status.message.c_str(), message);
    return status.kind == StatusKind::kCorruptPayload ? 2 : 1;
  } catch (const std::bad_alloc&) {
    WriteMessage("out of memory", message);
    return 3;
  } catch (const std::exception& error) {
    WriteMessage(error.what(), message);
    return 4;
  } catch (...) {
    WriteMessage("unknown exception", message);
    return 4;
  }
}

// Writes a selection, if there was no error. indices[k]; info[2]: the threshold, and the number of elements that
// reached the hint.
inline Status CopySelection(const Status& status, const Selection& selection, int64_t* indices, double* info) {
  if (!status.ok()) return status;
  std::copy(selection.indices.begin(), selection.indices.end(), indices);
  info[0] = selection.threshold;
  info[1] = static_cast<double>(selection.passed);
  return Status::Ok();
}

inline PayloadFormat FormatOf(const HvdSparseForm& form) {
  PayloadFormat format{form.n, form.k, static_cast<Coding>(form.coding), static_cast<DType>(form.dtype), {}};
  for (int64_t s = 0; s < form.segment_count; ++s) {
    format.segments.push_back({form.segments[2 * s], form.segments[2 * s + 1]});
  }
  return format;
}

}  // namespace hvd_sparse
