#include "low_bit.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "low_bit_level.h"
#include "run_length.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kLevelBytes = sizeof(float);

// Returns the bits per value, which equal the levels per group.
int64_t CodeBits(DType dtype) { return dtype == DType::kInt2 ? 2 : 1; }

int64_t GroupCount(const Segments& segments) {
  int64_t count = segments.empty() ? 1 : 0;
  for (const Segment& segment : segments) count += segment.channels;
  return count;
}

// The groups that contain at least one of the indices, numbered in ascending order.
struct Slots {
  Slots(const Segments& segments, const int64_t* indices, int64_t k)
      : of(segments.empty() ? 0 : static_cast<size_t>(k)) {
    if (segments.empty()) {
      count = k > 0 ? 1 : 0;
      return;
    }
    size_t at = 0;
    int64_t first = 0;  // first group of the segment
    for (int64_t j = 0; j < k; ++j) {
      for (; at + 1 < segments.size() && indices[j] >= segments[at + 1].begin; ++at) first += segments[at].channels;
      of[static_cast<size_t>(j)] = first + (indices[j] - segments[at].begin) % segments[at].channels;
    }
    std::vector<int64_t> slots(static_cast<size_t>(GroupCount(segments)), 0);
    for (const int64_t group : of) slots[static_cast<size_t>(group)] = 1;
    for (int64_t& slot : slots) {
      const int64_t is_used = slot;
      slot = count;
      count += is_used;
    }
    for (int64_t& group : of) group = slots[static_cast<size_t>(group)];
  }

  size_t Of(int64_t j) const { return of.empty() ? 0 : static_cast<size_t>(of[static_cast<size_t>(j)]); }

  std::vector<int64_t> of;  // empty if there is one group
  int64_t count = 0;
};

// The classes of magnitudes in each group, one for each level.
class GroupClasses {
 public:
  GroupClasses(size_t groups, size_t levels)
      : levels_(levels), added_(groups, 0), chunks_(groups * levels), sums_(groups * levels) {}

  // Adds the next entry of a group.
  void Add(size_t group, size_t level, uint32_t bits) {
    if (added_[group]++ == kLevelChunk) EndChunk(group);
    chunks_[group * levels_ + level].Add(bits);
  }

  const MagnitudeClass& Of(size_t group, size_t level) const { return sums_[group * levels_ + level]; }

  void Finish() {
    for (size_t group = 0; group < added_.size(); ++group) EndChunk(group);
  }

 private:
  void EndChunk(size_t group) {
    for (size_t at = group * levels_; at < (group + 1) * levels_; ++at) {
      sums_[at].Add(chunks_[at]);
      chunks_[at] = {};
    }
    added_[group] = 1;
  }

  size_t levels_;
  std::vector<int64_t> added_;  // entries of the chunk
  std::vector<MagnitudeClass> chunks_;
  std::vector<MagnitudeClass> sums_;
};

// Checks segments, and that indices ascend, when the number of elements is unknown, with kMaxElements as the limit.
Status CheckAscendingIndices(const Segments& segments, const int64_t* indices, int64_t k) {
  if (segments.empty()) return Status::Ok();
  HVD_SPARSE_RETURN_IF_ERROR(CheckAscending(indices, k, kMaxElements));
  return CheckSegments(segments, kMaxElements);
}

}  // namespace

Status CheckSegments(const Segments& segments, int64_t n) {
  for (size_t s = 0; s < segments.size(); ++s) {
    const int64_t begin = segments[s].begin;
    const int64_t end = s + 1 < segments.size() ? segments[s + 1].begin : n;
    const bool fits = (s > 0 || begin == 0) && begin < end && end <= n;  // ensures that end - begin does not overflow
    if (!fits || segments[s].channels < 1 || end - begin < segments[s].channels) {
      return Status::InvalidArgument("segment " + std::to_string(s) + " from " + std::to_string(begin) + " to " +
                                     std::to_string(end) + " of n = " + std::to_string(n) + " elements cannot have " +
                                     std::to_string(segments[s].channels) + " channels");
    }
  }
  return Status::Ok();
}

int64_t LowBitSize(DType dtype, int64_t k, const Segments& segments) {
  return kLevelBytes * CodeBits(dtype) * std::min(k, GroupCount(segments)) + (CodeBits(dtype) * k + 7) / 8;
}

Status QuantizeLowBit(const float* values, const int64_t* indices, int64_t k, DType dtype, Level level,
                      const Segments& segments, float* result) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckAscendingIndices(segments, indices, k));
  const Slots slots(segments, indices, k);
  const bool splits = CodeBits(dtype) == 2;
  const auto groups = static_cast<size_t>(slots.count);
  const auto group_of = [&](int64_t j) { return slots.Of(j); };
  std::vector<double> split(groups, 0);
  if (splits) {
    GroupClasses whole(groups, 1);
    for (int64_t j = 0; j < k; ++j) whole.Add(group_of(j), 0, MagnitudeBits(values[j]));
    whole.Finish();
    for (size_t group = 0; group < groups; ++group) split[group] = whole.Of(group, 0).Mean();
  }
  const auto level_of = [&](int64_t j) -> size_t {
    return splits && MagnitudeFromBits(float{}, MagnitudeBits(values[j])) >= split[group_of(j)] ? 1 : 0;
  };
  GroupClasses classes(groups, 2);
  for (int64_t j = 0; j < k; ++j) classes.Add(group_of(j), level_of(j), MagnitudeBits(values[j]));
  classes.Finish();
  for (int64_t j = 0; j < k; ++j) {
    result[j] = WithSignOf(values[j], classes.Of(group_of(j), level_of(j)).Of(level));
  }
  return Status::Ok();
}

Status WriteLowBit(const float* values, const int64_t* indices, int64_t k, DType dtype, const Segments& segments,
                   uint8_t* out) {
  const Slots slots(segments, indices, k);
  const int64_t code_bits = CodeBits(dtype);
  std::vector<uint32_t> low(static_cast<size_t>(slots.count), kUnsetMagnitude);
  std::vector<uint32_t> high(static_cast<size_t>(slots.count), 0);
  for (int64_t j = 0; j < k; ++j) {
    const size_t slot = slots.Of(j);
    low[slot] = std::min(low[slot], MagnitudeBits(values[j]));
    high[slot] = std::max(high[slot], MagnitudeBits(values[j]));
  }
  uint8_t* codes = out + LowBitSize(dtype, k, segments) - (code_bits * k + 7) / 8;
  for (size_t slot = 0; slot < low.size(); ++slot, out += kLevelBytes * code_bits) {
    std::memcpy(out, &low[slot], sizeof low[slot]);
    if (code_bits == 2) std::memcpy(out + kLevelBytes, &high[slot], sizeof high[slot]);
  }
  for (int64_t j = 0; j < k; ++j) {
    const size_t slot = slots.Of(j);
    const uint32_t bits = MagnitudeBits(values[j]);
    const bool is_large = bits != low[slot];
    if (is_large && (code_bits == 1 || bits != high[slot])) {
      return Status::InvalidArgument("values have more magnitudes in a group than their type; quantize them first");
    }
    const uint32_t code = (FloatToBits(values[j]) >> 31) | (is_large ? 2u : 0u);
    codes[code_bits * j / 8] |= static_cast<uint8_t>(code << (code_bits * j % 8));
  }
  return Status::Ok();
}

void ReadLowBit(const uint8_t* section, const int64_t* indices, int64_t k, DType dtype, const Segments& segments,
                float* values) {
  const Slots slots(segments, indices, k);
  const int64_t code_bits = CodeBits(dtype);
  const uint8_t* codes = section + LowBitSize(dtype, k, segments) - (code_bits * k + 7) / 8;
  for (int64_t j = 0; j < k; ++j) {
    const uint32_t code = codes[code_bits * j / 8] >> (code_bits * j % 8);
    const int64_t which = code_bits == 2 ? (code >> 1) & 1u : 0;
    uint32_t bits;
    std::memcpy(&bits, section + kLevelBytes * (code_bits * static_cast<int64_t>(slots.Of(j)) + which), sizeof bits);
    values[j] = BitsToFloat((bits & 0x7fffffffu) | (code & 1u) << 31);
  }
}

}  // namespace hvd_sparse
