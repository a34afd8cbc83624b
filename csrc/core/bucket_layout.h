// The layout of a bucket's message: the order and offsets of its payloads, and the members of each selection. The
// PyTorch and TensorFlow adapters share it.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <vector>

#include "payload.h"
#include "status.h"

namespace hvd_sparse {

// An argument that is a list, by its name, and its number of entries.
struct NamedList {
  template <typename Integer>
  NamedList(const char* argument, Integer entries) : name(argument), size(static_cast<size_t>(entries)) {}

  const char* name;
  size_t size;
};

// A list that may be empty: the size of an empty one is not checked.
template <typename Integer>
NamedList Optional(const char* name, Integer size, size_t count) {
  return {name, size == 0 ? count : static_cast<size_t>(size)};
}

// Returns InvalidArgument unless each list has `count` entries, one a `what`.
Status CheckCounts(const char* what, size_t count, std::initializer_list<NamedList> lists);

// A bucket: the tensors ("members") whose payloads form one message.
struct BucketForm {
  std::vector<int64_t> sizes;     // elements of each member
  std::vector<int64_t> channels;  // groups of each member for low-bit values; empty for other values
  bool joint = false;             // one joint selection in all members, instead of one in each
  PayloadFormat format = {};      // coding and dtype
};

// A selection that contains members of a call, and the place of its payload in the message.
struct SelectionLayout {
  size_t index = 0;  // number among all selections of the bucket
  PayloadFormat format = {};
  int64_t offset = 0;  // of the payload in the message, in bytes
  size_t first = 0;    // the selection contains members [first, last) of the call
  size_t last = 0;
  std::vector<int64_t> begins;  // offset of each of these members in the selection, in elements
};

struct BucketLayout {
  std::vector<SelectionLayout> selections;
  int64_t bytes = 0;  // size of the message
};

// Plans the message of a call. ks: the k of each selection. members: the ascending numbers of the members in the call.
// The layout omits the per-tensor selections of other members; it always contains a joint selection.
Status PlanBucket(const BucketForm& form, const std::vector<int64_t>& ks, const std::vector<int64_t>& members,
                  BucketLayout* layout);

// Returns the payload format of each member for messages whose numbers of entries vary; k is set to 1.
Status MemberFormats(const BucketForm& form, std::vector<PayloadFormat>* formats);

}  // namespace hvd_sparse
