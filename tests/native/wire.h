// The wire format a second time, byte by byte from the comments in payload.h and low_bit.h, without a line of their
// .cc.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "payload.h"

namespace hvd_sparse {

using Bytes = std::vector<uint8_t>;

// Where the header's fields are.
constexpr size_t kCodingAt = 5, kDTypeAt = 6, kZeroAt = 7, kElementsAt = 8, kEntriesAt = 16, kChecksumAt = 24,
                 kZeroTooAt = 28, kCountsAt = 32;

// CRC-32 one bit at a time.
inline uint32_t BitwiseCrc32(const uint8_t* data, size_t size) {
  uint32_t crc = 0xFFFFFFFFu;
  for (size_t i = 0; i < size; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1u) != 0 ? (crc >> 1) ^ 0xEDB88320u : crc >> 1;
  }
  return crc ^ 0xFFFFFFFFu;
}

// An exact heap copy of some bytes, so that AddressSanitizer sees the first byte read past their end.
class Exact {
 public:
  explicit Exact(const Bytes& bytes) : Exact(bytes, bytes.size()) {}
  Exact(const Bytes& bytes, size_t size) : data_(new uint8_t[size]) {
    std::copy_n(bytes.begin(), std::min(size, bytes.size()), data_.get());
    std::fill(data_.get() + std::min(size, bytes.size()), data_.get() + size, uint8_t{0});
  }
  const uint8_t* get() const { return data_.get(); }

 private:
  std::unique_ptr<uint8_t[]> data_;
};

inline void WriteNumber(Bytes* bytes, size_t at, uint64_t number, int width) {
  for (int i = 0; i < width; ++i) bytes->at(at + static_cast<size_t>(i)) = static_cast<uint8_t>(number >> (8 * i));
}

inline uint64_t ReadNumber(const Bytes& bytes, size_t at, int width) {
  uint64_t number = 0;
  for (int i = 0; i < width; ++i) number |= uint64_t{bytes[at + static_cast<size_t>(i)]} << (8 * i);
  return number;
}

inline void AppendNumber(Bytes* bytes, uint64_t number, int width) {
  bytes->resize(bytes->size() + static_cast<size_t>(width));
  WriteNumber(bytes, bytes->size() - static_cast<size_t>(width), number, width);
}

inline void Seal(Bytes* payload) {
  WriteNumber(payload, kChecksumAt, 0, 4);
  WriteNumber(payload, kChecksumAt, BitwiseCrc32(payload->data(), payload->size()), 4);
}

// What a payload says, true or not.
struct Content {
  std::vector<uint32_t> counts;  // one a block
  std::vector<uint16_t> runs;    // k, or none
  std::vector<uint64_t> values;  // their bits, k or none; of low-bit types, those of the float32 that they stand for
};

// Where the parts after the counts begin.
struct Parts {
  size_t bitmap, runs, values, end;
};

inline size_t RoundUp(size_t size, size_t multiple) {
  while (size % multiple != 0) ++size;
  return size;
}

// Of low-bit types the bits an entry, and centres a group; of others 0.
inline size_t LevelsOf(DType dtype) { return dtype == DType::kInt2 ? 2 : dtype == DType::kInt1 ? 1 : 0; }

inline size_t GroupsOf(const Segments& segments) {
  size_t groups = 0;
  for (const Segment& segment : segments) groups += static_cast<size_t>(segment.columns);
  return segments.empty() ? 1 : groups;
}

// Which segment, and which of its columns: they compare as groups are ordered.
using Group = std::pair<size_t, int64_t>;

inline Group GroupOf(const Segments& segments, int64_t index) {
  if (segments.empty()) return {0, 0};
  size_t at = 0;
  while (at + 1 < segments.size() && segments[at + 1].begin <= index) ++at;
  return {at, (index - segments[at].begin) % segments[at].columns};
}

// How many bytes of a low-bit section are centres.
inline size_t CentresSize(DType dtype, size_t k, const Segments& segments) {
  return 4 * LevelsOf(dtype) * std::min(k, GroupsOf(segments));
}

// The values of entries at `indices`, by their bits, in a section of its own: centres in the order of groups, the
// smaller first, then the codes.
inline Bytes BuildLowBit(DType dtype, const std::vector<int64_t>& indices, const std::vector<uint64_t>& values,
                         const Segments& segments) {
  const size_t levels = LevelsOf(dtype);
  std::map<Group, std::set<uint64_t>> magnitudes;
  for (size_t j = 0; j < indices.size(); ++j) {
    magnitudes[GroupOf(segments, indices[j])].insert(values[j] & 0x7fffffffu);
  }
  Bytes section;
  for (const auto& [group, found] : magnitudes) {
    AppendNumber(&section, *found.begin(), 4);
    if (levels == 2) AppendNumber(&section, *found.rbegin(), 4);
  }
  const size_t codes = CentresSize(dtype, indices.size(), segments);
  section.resize(codes + RoundUp(levels * indices.size(), 8) / 8);
  for (size_t j = 0; j < indices.size(); ++j) {
    const bool second = (values[j] & 0x7fffffffu) != *magnitudes[GroupOf(segments, indices[j])].begin();
    const uint64_t code = values[j] >> 31 | (second ? 2u : 0u);
    for (size_t bit = 0; bit < levels; ++bit) {
      const size_t place = levels * j + bit;
      section[codes + place / 8] |= static_cast<uint8_t>((code >> bit & 1u) << place % 8);
    }
  }
  return section;
}

// The bits of the float32 that a section of any bytes spells, from byte `at` on.
inline std::vector<uint64_t> ParseLowBit(DType dtype, const std::vector<int64_t>& indices, const Segments& segments,
                                         const Bytes& bytes, size_t at) {
  const size_t levels = LevelsOf(dtype), codes = at + CentresSize(dtype, indices.size(), segments);
  std::map<Group, size_t> places;  // of a group's first centre
  for (const int64_t index : indices) places[GroupOf(segments, index)] = 0;
  for (auto& [group, place] : places) {
    place = at;
    at += 4 * levels;
  }
  const auto bit_at = [&](size_t place) { return static_cast<size_t>(bytes[codes + place / 8] >> place % 8 & 1); };
  std::vector<uint64_t> values;
  for (size_t j = 0; j < indices.size(); ++j) {
    const size_t level = levels == 2 ? bit_at(2 * j + 1) : 0;
    const uint64_t centre = ReadNumber(bytes, places[GroupOf(segments, indices[j])] + 4 * level, 4);
    values.push_back((centre & 0x7fffffffu) | uint64_t{bit_at(levels * j)} << 31);
  }
  return values;
}

inline Parts PartsOf(const PayloadFormat& format) {
  const auto n = static_cast<size_t>(format.n), k = static_cast<size_t>(format.k);
  const size_t levels = LevelsOf(format.dtype);
  const size_t width = levels > 0 ? 4 : static_cast<size_t>(ItemSize(format.dtype));
  const size_t blocks = n / 65536 + (n % 65536 != 0 ? 1 : 0);
  Parts parts{kCountsAt, kCountsAt, kCountsAt, 0};
  if (format.coding == Coding::kRunLength) {
    parts.bitmap = kCountsAt + 2 * blocks;
    parts.runs = RoundUp(parts.bitmap + (k >= 65536 ? RoundUp(blocks, 8) / 8 : 0), 2);
    parts.values = RoundUp(parts.runs + 2 * k, width);
  }
  const size_t low_bit = CentresSize(format.dtype, k, format.segments) + RoundUp(levels * k, 8) / 8;
  parts.end = RoundUp(parts.values + (levels > 0 ? low_bit : width * k), 8);
  return parts;
}

// Where the entries of counts and runs are, true or not.
inline std::vector<int64_t> PlacesOf(const Content& content) {
  std::vector<int64_t> places;
  for (size_t block = 0; block < content.counts.size(); ++block) {
    auto position = static_cast<int64_t>(65536 * block);
    for (uint32_t i = 0; i < content.counts[block] && places.size() < content.runs.size(); ++i, ++position) {
      position += content.runs[places.size()];
      places.push_back(position);
    }
  }
  return places;
}

inline Bytes StartOf(const PayloadFormat& format) {
  return {'H', 'V', 'D', 'S', 1, static_cast<uint8_t>(format.coding), static_cast<uint8_t>(format.dtype), 0};
}

inline Bytes BuildPayload(const PayloadFormat& format, const Content& content) {
  const Parts parts = PartsOf(format);
  Bytes bytes = StartOf(format);
  AppendNumber(&bytes, static_cast<uint64_t>(format.n), 8);
  AppendNumber(&bytes, content.runs.size(), 8);
  AppendNumber(&bytes, 0, 8);
  if (format.coding == Coding::kRunLength) {
    for (const uint32_t count : content.counts) AppendNumber(&bytes, count % 65536, 2);
    bytes.resize(parts.runs);
    for (size_t block = 0; block < content.counts.size() && format.k >= 65536; ++block) {
      if (content.counts[block] == 65536) bytes[parts.bitmap + block / 8] |= static_cast<uint8_t>(1 << block % 8);
    }
    for (const uint16_t run : content.runs) AppendNumber(&bytes, run, 2);
  }
  bytes.resize(parts.values);
  if (LevelsOf(format.dtype) > 0) {
    const Bytes section = BuildLowBit(format.dtype, PlacesOf(content), content.values, format.segments);
    bytes.insert(bytes.end(), section.begin(), section.end());
  } else {
    for (const uint64_t value : content.values) AppendNumber(&bytes, value, static_cast<int>(ItemSize(format.dtype)));
  }
  bytes.resize(parts.end);
  Seal(&bytes);
  return bytes;
}

// Do counts and runs say where `entries` entries are? Each is placed by hand.
inline bool ParsePlaces(const PayloadFormat& format, const Bytes& bytes, uint64_t entries,
                        std::vector<int64_t>* indices) {
  const Parts parts = PartsOf(format);
  if (format.coding == Coding::kDense) {
    for (int64_t i = 0; entries > 0 && i < format.n; ++i) indices->push_back(i);
    return true;
  }
  for (size_t block = 0; block < (parts.bitmap - kCountsAt) / 2; ++block) {
    uint64_t count = ReadNumber(bytes, kCountsAt + 2 * block, 2);
    const bool full = format.k >= 65536 && (bytes[parts.bitmap + block / 8] >> block % 8 & 1) != 0;
    if (full) count += 65536;
    auto position = static_cast<int64_t>(65536 * block);
    const int64_t end = std::min(position + 65536, format.n);
    for (uint64_t i = 0; i < count; ++i, ++position) {
      if (indices->size() >= entries) return false;
      position += static_cast<int64_t>(ReadNumber(bytes, parts.runs + 2 * indices->size(), 2));
      if (position >= end) return false;
      indices->push_back(position);
    }
  }
  return indices->size() == entries;
}

// Is `bytes` a payload of `format`? Then also where its entries are, and their bits.
inline bool ParsePayload(const PayloadFormat& format, const Bytes& bytes, std::vector<int64_t>* indices,
                         std::vector<uint64_t>* values) {
  const Parts parts = PartsOf(format);
  if (bytes.size() != parts.end) return false;
  Bytes sealed = bytes;
  Seal(&sealed);
  const Bytes start = StartOf(format);
  const uint64_t entries = ReadNumber(bytes, kEntriesAt, 8);
  if (sealed != bytes || !std::equal(start.begin(), start.end(), bytes.begin())) return false;
  if (ReadNumber(bytes, kElementsAt, 8) != static_cast<uint64_t>(format.n)) return false;
  if (ReadNumber(bytes, kZeroTooAt, 4) != 0) return false;
  if (entries != 0 && entries != static_cast<uint64_t>(format.k)) return false;
  indices->clear();
  values->clear();
  if (!ParsePlaces(format, bytes, entries, indices)) return false;
  if (LevelsOf(format.dtype) > 0) {
    *values = ParseLowBit(format.dtype, *indices, format.segments, bytes, parts.values);
    return true;
  }
  const auto width = static_cast<size_t>(ItemSize(format.dtype));
  for (size_t j = 0; j < indices->size(); ++j) {
    values->push_back(ReadNumber(bytes, parts.values + width * j, static_cast<int>(width)));
  }
  return true;
}

}  // namespace hvd_sparse
