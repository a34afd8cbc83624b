// How the payloads of a message are laid out, as the operators of buckets are told.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "arguments.h"

namespace hvd_sparse {

using at::IntArrayRef;
using at::TensorList;
using OptionalTensors = c10::List<std::optional<Tensor>>;

inline void CheckCounts(const char* op, const char* what, size_t count, std::initializer_list<size_t> sizes) {
  for (const size_t size : sizes) {
    TORCH_CHECK_VALUE(size == count, "hvd_sparse.", op, ": every list must be ", count, ", one a ", what, "; got ",
                      size);
  }
}

// What selections learn from one step to the next, as a tensor.
inline void CheckHints(const char* op, const Tensor& hints, size_t selections) {
  TORCH_CHECK_VALUE(hints.dim() == 2 && hints.size(0) == static_cast<int64_t>(selections) && hints.size(1) == 3,
                    "hvd_sparse.", op, ": hints must be [", selections, ", 3], got ", hints.sizes());
}

// The formats of a bucket's payloads, but for their number of entries.
inline std::vector<PayloadFormat> FormatsOf(const char* op, IntArrayRef ns, IntArrayRef columns,
                                            const std::string& coding, const std::string& value_dtype) {
  CheckCounts(op, "member", ns.size(), {columns.empty() ? ns.size() : columns.size()});
  std::vector<PayloadFormat> formats;
  for (size_t i = 0; i < ns.size(); ++i) {
    formats.push_back(ParseFormat(op, ns[i], 1, coding, value_dtype, {}));
    if (!columns.empty()) formats.back().segments = {{0, columns[i]}};
  }
  return formats;
}

// The selections of a bucket, where their payloads lie in a message, and which tensors take part in which.
class Layout {
 public:
  Layout(const char* op, IntArrayRef ns, IntArrayRef ks, IntArrayRef offsets, IntArrayRef selections,
         IntArrayRef begins, const std::string& coding, const std::string& value_dtype, const OptionalTensors& segments)
      : op_(op), offsets_(offsets), selections_(selections), begins_(begins) {
    CheckCounts(op, "selection", ns.size(), {ks.size(), offsets.size(), segments.size()});
    CheckCounts(op, "member", selections.size(), {begins.size()});
    int64_t last = 0;
    for (const int64_t selection : selections) {
      TORCH_CHECK_VALUE(selection >= last && selection < static_cast<int64_t>(ns.size()), "hvd_sparse.", op,
                        ": selections must ascend in [0, ", ns.size(), "), got ", selection, " after ", last);
      last = selection;
    }
    for (size_t i = 0; i < ns.size(); ++i) {
      formats_.push_back(ParseFormat(op, ns[i], ks[i], coding, value_dtype, segments.get(i)));
    }
  }

  const std::vector<PayloadFormat>& formats() const { return formats_; }
  int64_t begin(size_t member) const { return begins_[member]; }

  // Calls take(member) for each member of a selection, in order, which follow each other there without overlapping.
  template <typename Take>
  void ForMembers(size_t selection, TensorList members, const Take& take) {
    int64_t end = 0;
    for (; next_ < members.size() && selections_[next_] == static_cast<int64_t>(selection); ++next_) {
      const int64_t size = members[next_].numel();
      TORCH_CHECK_VALUE(begins_[next_] >= end && size <= formats_[selection].n - begins_[next_], "hvd_sparse.", op_,
                        ": member ", next_, ", ", size, " elements from ", begins_[next_], ", does not fit selection ",
                        selection, " of ", formats_[selection].n);
      end = begins_[next_] + size;
      take(next_);
    }
  }

  // A selection's payload.
  uint8_t* PayloadIn(size_t selection, const Tensor& message) const {
    int64_t size = 0;
    Raise(op_, PayloadSize(formats_[selection], &size));
    const int64_t offset = offsets_[selection];
    TORCH_CHECK_VALUE(offset >= 0 && size <= message.numel() - offset, "hvd_sparse.", op_, ": a payload of ", size,
                      " bytes at offset ", offset, " leaves the message of ", message.numel());
    return static_cast<uint8_t*>(message.data_ptr()) + offset;
  }

 private:
  const char* op_;
  IntArrayRef offsets_, selections_, begins_;
  std::vector<PayloadFormat> formats_;
  size_t next_ = 0;
};

inline std::optional<Tensor> MemberOf(TensorList list, size_t i) {
  return list.empty() ? std::optional<Tensor>() : std::optional<Tensor>(list[i]);
}

}  // namespace hvd_sparse
