#include "bucket_layout.h"

#include <string>
#include <vector>

#include "expect.h"
#include "payloads.h"

namespace hvd_sparse {
namespace {

using Numbers = std::vector<int64_t>;

const PayloadFormat kCode{0, 0, Coding::kEliasFano, DType::kFloat16, {}};
const PayloadFormat kLowBit{0, 0, Coding::kRunLength, DType::kInt2, {}};
const Numbers kSizes{500, 1, 70000};

int64_t SizeOf(PayloadFormat format, int64_t n, int64_t k, Segments segments = {}) {
  format.n = n;
  format.k = k;
  format.segments = std::move(segments);
  int64_t size = 0;
  EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "size");
  return size;
}

BucketLayout Plan(const BucketForm& form, const Numbers& ks, const Numbers& members) {
  BucketLayout layout{{{}, {}}, 99};  // the old content is replaced
  layout.selections.clear();
  EXPECT_STATUS(StatusKind::kOk, PlanBucket(form, ks, members, &layout), "plan");
  return layout;
}

TEST(ASelectionEach) {
  const Numbers ks{5, 1, 70};
  const Numbers sizes{SizeOf(kCode, 500, 5), SizeOf(kCode, 1, 1), SizeOf(kCode, 70000, 70)};
  const BucketLayout layout = Plan({kSizes, {}, false, kCode}, ks, {0, 1, 2});
  EXPECT_EQ(sizes[0] + sizes[1] + sizes[2], layout.bytes, "all");
  EXPECT_EQ(size_t{3}, layout.selections.size(), "all");
  int64_t offset = 0;
  for (size_t i = 0; i < 3; ++i) {
    const SelectionLayout& one = layout.selections[i];
    const std::string where = "selection " + std::to_string(i);
    EXPECT(one.index == i && one.first == i && one.last == i + 1 && one.begins == Numbers{0}, where);
    EXPECT(one.format.n == kSizes[i] && one.format.k == ks[i] && one.format.segments.empty(), where);
    EXPECT(one.format.coding == kCode.coding && one.format.dtype == kCode.dtype, where);
    EXPECT_EQ(offset, one.offset, where);
    offset += sizes[i];
  }
}

TEST(MissingMembersKeepTheirPlace) {
  const BucketLayout layout = Plan({kSizes, {}, false, kCode}, {5, 1, 70}, {0, 2});
  EXPECT_EQ(size_t{2}, layout.selections.size(), "two of three");
  const SelectionLayout& last = layout.selections[1];
  EXPECT(last.index == 2 && last.first == 1 && last.last == 2, "the second of the call is the third of the bucket");
  EXPECT_EQ(SizeOf(kCode, 500, 5) + SizeOf(kCode, 1, 1), last.offset, "behind the payload of what is missing");
  EXPECT_EQ(last.offset + SizeOf(kCode, 70000, 70), layout.bytes, "whole message");
  const BucketLayout none = Plan({kSizes, {}, false, kCode}, {5, 1, 70}, {});
  EXPECT(none.selections.empty() && none.bytes == layout.bytes, "no member");
}

TEST(AJointSelection) {
  const Segments segments{{0, 10}, {500, 1}, {501, 7}};
  const BucketForm form{kSizes, {10, 1, 7}, true, kLowBit};
  for (const Numbers& members : std::vector<Numbers>{{0, 1, 2}, {1, 2}, {}}) {
    const BucketLayout layout = Plan(form, {80}, members);
    EXPECT_EQ(size_t{1}, layout.selections.size(), "joint");
    const SelectionLayout& one = layout.selections[0];
    EXPECT_EQ(SizeOf(kLowBit, 70501, 80, segments), layout.bytes, "joint");
    EXPECT(one.index == 0 && one.offset == 0 && one.first == 0 && one.last == members.size(), "joint");
    EXPECT(one.format.n == 70501 && one.format.k == 80, "joint");
    Numbers begins;
    for (const int64_t member : members) begins.push_back(Numbers{0, 500, 501}[static_cast<size_t>(member)]);
    EXPECT(one.begins == begins, "joint");
    EXPECT_EQ(segments.size(), one.format.segments.size(), "joint");
    for (size_t s = 0; s < segments.size(); ++s) {
      EXPECT(one.format.segments[s].begin == segments[s].begin, "segment");
      EXPECT(one.format.segments[s].channels == segments[s].channels, "segment");
    }
  }
}

TEST(SeparateSelectionsHaveSegmentsOfTheirOwn) {
  const BucketLayout layout = Plan({kSizes, {10, 1, 7}, false, kLowBit}, {5, 1, 70}, {0, 1, 2});
  EXPECT_EQ(SizeOf(kLowBit, 500, 5, {{0, 10}}), layout.selections[1].offset, "the first payload");
  EXPECT(layout.selections[2].format.segments.size() == 1 && layout.selections[2].format.segments[0].begin == 0 &&
             layout.selections[2].format.segments[0].channels == 7,
         "the third");
  std::vector<PayloadFormat> formats(7);
  EXPECT_STATUS(StatusKind::kOk, MemberFormats({kSizes, {10, 1, 7}, false, kLowBit}, &formats), "formats");
  EXPECT_EQ(size_t{3}, formats.size(), "formats");
  EXPECT(formats[2].n == 70000 && formats[2].k == 1 && formats[2].segments[0].channels == 7, "formats");
  EXPECT(formats[2].dtype == DType::kInt2 && formats[2].coding == Coding::kRunLength, "formats");
}

void ExpectRefused(const BucketForm& form, const Numbers& ks, const Numbers& members, const std::string& says) {
  BucketLayout layout;
  const Status status = PlanBucket(form, ks, members, &layout);
  EXPECT(status.kind == StatusKind::kInvalidArgument, says);
  EXPECT(status.message.find(says) != std::string::npos, status.message);
}

TEST(WhatDoesNotFitIsRefused) {
  const BucketForm form{kSizes, {}, false, kCode}, joint{kSizes, {}, true, kCode};
  ExpectRefused(form, {5, 1}, {0, 1, 2}, "ks must have 3 entries, one a selection; got 2");
  ExpectRefused(joint, {5, 1}, {0, 1, 2}, "ks must have 1 entries, one a selection; got 2");
  ExpectRefused({kSizes, {1, 1}, false, kLowBit}, {5, 1, 70}, {0}, "channels must have 3 entries, one a member; got 2");
  ExpectRefused(form, {5, 1, 70}, {1, 0}, "members must ascend in [0, 3), got 0 after 1");
  ExpectRefused(form, {5, 1, 70}, {1, 1}, "members must ascend in [0, 3), got 1 after 1");
  ExpectRefused(joint, {5}, {3}, "members must ascend in [0, 3), got 3 after -1");
  ExpectRefused(form, {5, 1, 70}, {-1}, "members must ascend in [0, 3), got -1 after -1");
  ExpectRefused(form, {5, 2, 70}, {0}, "k must be in [1, n = 1], got 2");  // of a member that is missing, too
  ExpectRefused({{5, -1}, {}, true, kCode}, {1}, {}, "sizes must be in [0, 2^48], got -1");
  ExpectRefused({{5, int64_t{1} << 49}, {}, true, kCode}, {1}, {}, "sizes must be in [0, 2^48]");
  for (const bool is_joint : {false, true}) {
    const int64_t most = int64_t{1} << 48;
    const std::vector<int64_t> ks(is_joint ? 1 : 2, 1);
    ExpectRefused({{most, most}, {}, is_joint, kCode}, ks, {}, "the sum of the sizes must be at most 2^48");
  }
  std::vector<PayloadFormat> formats;
  EXPECT_STATUS(StatusKind::kInvalidArgument, MemberFormats({kSizes, {1}, false, kLowBit}, &formats), "channels");
}

}  // namespace
}  // namespace hvd_sparse
