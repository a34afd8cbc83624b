// How a bucket is laid out: which members share a selection, and where its payload lies in the message.
#pragma once

#include <vector>

#include "kernel.h"

namespace hvd_sparse {

// Members [first, last) of a bucket that share a selection, and its payload in the message.
struct Selected {
  int first;
  int last;
  PayloadFormat format;
  std::vector<int64_t> begins;  // of each member's elements in the selection
  int64_t offset;               // in bytes
};

// How a bucket is laid out: what the op's attributes say, and k of the call.
class BucketLayout {
 public:
  absl::Status Read(OpKernelConstruction* construction) {
    TF_RETURN_IF_ERROR(GetFormat(construction, &shared_));
    TF_RETURN_IF_ERROR(construction->GetAttr("columns", &columns_));
    return construction->GetAttr("joint", &joint_);
  }

  // `sizes`: n of each member. One entry of ks a selection: all members share one if joint, else each has its own.
  absl::Status Plan(const Call& call, const std::vector<int64_t>& sizes, std::vector<Selected>* selections,
                    int64_t* message_size) const {
    const int64_t* ks = nullptr;
    int64_t count = 0;
    TF_RETURN_IF_ERROR(call.Vector("ks", &ks, &count));
    const size_t expected = joint_ ? 1 : sizes.size();
    if (static_cast<size_t>(count) != expected) {
      return call.Invalid("ks must have one entry a selection, ", expected, ", got ", count);
    }
    if (!columns_.empty() && columns_.size() != sizes.size()) {
      return call.Invalid("columns must have one entry a member, ", sizes.size(), ", got ", columns_.size());
    }
    *message_size = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (i == 0 || !joint_) {
        selections->push_back({static_cast<int>(i), 0, shared_, {}, 0});
        selections->back().format.n = 0;
        selections->back().format.k = ks[selections->size() - 1];
      }
      Selected& selection = selections->back();
      selection.last = static_cast<int>(i) + 1;
      if (!columns_.empty()) selection.format.segments.push_back({selection.format.n, columns_[i]});
      selection.begins.push_back(selection.format.n);
      selection.format.n += sizes[i];
    }
    for (Selected& selection : *selections) {
      int64_t size = 0;
      TF_RETURN_IF_ERROR(call.Report(PayloadSize(selection.format, &size)));
      selection.offset = *message_size;
      *message_size += size;
    }
    return absl::OkStatus();
  }

 private:
  PayloadFormat shared_;
  std::vector<int64_t> columns_;
  bool joint_ = false;
};

}  // namespace hvd_sparse
