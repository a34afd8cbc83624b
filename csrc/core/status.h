// What a core function reports; the framework adapters turn it into an exception.
#pragma once

#include <string>
#include <utility>

namespace hvd_sparse {

enum class StatusKind {
  kOk,
  kInvalidArgument,  // the caller's fault: a size, a type, an order
  kCorruptPayload,   // bytes from the network that are not a payload of what was asked for
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
