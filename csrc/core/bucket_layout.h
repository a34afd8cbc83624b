// How the payloads of a bucket lie in its message, one after the other, and which members share a selection: the same
// for every adapter.
#pragma once

#include <cstddef>
#include <vector>

#include "payload.h"
#include "status.h"

namespace hvd_sparse {

// A bucket: the tensors whose payloads are one message.
struct BucketForm {
  std::vector<int64_t> sizes;     // of the members, in elements
  std::vector<int64_t> channels;  // of low-bit values, how many groups each member has; empty for other values
  bool joint = false;             // one selection in all members, in place of one in each
  PayloadFormat format = {};      // coding and dtype
};

// A selection in which members of a call take part, and its payload in the message.
struct SelectionLayout {
  size_t index = 0;  // among all selections of the bucket
  PayloadFormat format = {};
  int64_t offset = 0;  // of the payload, in bytes
  size_t first = 0;    // [first, last) of the call's members are in it
  size_t last = 0;
  std::vector<int64_t> begins;  // where each of these begins in the selection, in elements
};

struct BucketLayout {
  std::vector<SelectionLayout> selections;
  int64_t bytes = 0;  // of the message
};

// ks: one a selection. members: ascending numbers of the members that take part in the call. Separate selections of
// members that do not are left out of the layout; a joint selection always is in it.
Status PlanBucket(const BucketForm& form, const std::vector<int64_t>& ks, const std::vector<int64_t>& members,
                  BucketLayout* layout);

// The payloads of members whose numbers of entries vary, but for these: k is 1.
Status MemberFormats(const BucketForm& form, std::vector<PayloadFormat>* formats);

}  // namespace hvd_sparse
