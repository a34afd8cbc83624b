// The result of a core function. The framework adapters turn errors into exceptions.
#pragma once

#include <string>
#include <utility>

namespace hvd_sparse {

enum class StatusKind {
  kOk,
  kInvalidArgument,  // the caller passed a wrong size, type or order
  kCorruptPayload,   // received bytes are not a payload of the expected format
};

struct [[nodiscard]] Status {
  StatusKind kind = StatusKind::kOk;
  std::string message;

  bool ok() const { return kind == StatusKind::kOk; }

  static Status Ok() { return {}; }
  static Status InvalidArgument(std::string text) { return {StatusKind::kInvalidArgument, std::move(text)}; }
  static Status CorruptPayload(std::string text) { return {StatusKind::kCorruptPayload, std::move(text)}; }
};

}  // namespace hvd_sparse

#define HVD_SPARSE_RETURN_IF_ERROR(expression)          \
  do {                                                  \
    ::hvd_sparse::Status status_of_call = (expression); \
    if (!status_of_call.ok()) return status_of_call;    \
  } while (false)
