#include "bucket_layout.h"

#include <string>

namespace hvd_sparse {
namespace {

Status CheckForm(const BucketForm& form) {
  int64_t total = 0;
  for (const int64_t size : form.sizes) {
    if (size < 0 || size > kMaxElements) {
      return Status::InvalidArgument("sizes must be in [0, 2^48], got " + std::to_string(size));
    }
    total += size;
    if (total > kMaxElements) return Status::InvalidArgument("the sum of the sizes must be at most 2^48");
  }
  if (form.channels.empty()) return Status::Ok();
  return CheckCounts("member", form.sizes.size(), {{"channels", form.channels.size()}});
}

Status CheckMembers(const std::vector<int64_t>& members, size_t count) {
  int64_t last = -1;
  for (const int64_t member : members) {
    if (member <= last || member >= static_cast<int64_t>(count)) {
      return Status::InvalidArgument("members must ascend in [0, " + std::to_string(count) + "), got " +
                                     std::to_string(member) + " after " + std::to_string(last));
    }
    last = member;
  }
  return Status::Ok();
}

}  // namespace

Status CheckCounts(const char* what, size_t count, std::initializer_list<NamedList> lists) {
  for (const NamedList& list : lists) {
    if (list.size == count) continue;
    return Status::InvalidArgument(std::string(list.name) + " must have " + std::to_string(count) + " entries, one a " +
                                   what + "; got " + std::to_string(list.size));
  }
  return Status::Ok();
}

Status PlanBucket(const BucketForm& form, const std::vector<int64_t>& ks, const std::vector<int64_t>& members,
                  BucketLayout* layout) {
  const size_t selections = form.joint ? 1 : form.sizes.size();
  HVD_SPARSE_RETURN_IF_ERROR(CheckForm(form));
  HVD_SPARSE_RETURN_IF_ERROR(CheckCounts("selection", selections, {{"ks", ks.size()}}));
  HVD_SPARSE_RETURN_IF_ERROR(CheckMembers(members, form.sizes.size()));
  size_t member = 0, next = 0;
  layout->bytes = 0;
  for (size_t index = 0; index < selections; ++index) {
    SelectionLayout selection{index, form.format, layout->bytes, next, next, {}};
    selection.format.k = ks[index];
    const size_t end = form.joint ? form.sizes.size() : index + 1;
    for (; member < end; ++member) {
      if (!form.channels.empty()) selection.format.segments.push_back({selection.format.n, form.channels[member]});
      if (next < members.size() && members[next] == static_cast<int64_t>(member)) {
        selection.begins.push_back(selection.format.n);
        selection.last = ++next;
      }
      selection.format.n += form.sizes[member];
    }
    int64_t bytes = 0;
    HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(selection.format, &bytes));
    layout->bytes += bytes;
    if (form.joint || selection.last > selection.first) layout->selections.push_back(std::move(selection));
  }
  return Status::Ok();
}

Status MemberFormats(const BucketForm& form, std::vector<PayloadFormat>* formats) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckForm(form));
  formats->assign(form.sizes.size(), form.format);
  for (size_t i = 0; i < form.sizes.size(); ++i) {
    (*formats)[i].n = form.sizes[i];
    (*formats)[i].k = 1;
    if (!form.channels.empty()) (*formats)[i].segments = {{0, form.channels[i]}};
  }
  return Status::Ok();
}

}  // namespace hvd_sparse
