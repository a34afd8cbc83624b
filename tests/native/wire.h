// A second implementation of the wire format, written from the comments in payload.h, low_bit.h, positions.h and
// elias_fano.h, without code of their .cc files.
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

// Offsets of the header's fields.
constexpr size_t kCodingAt = 5, kDTypeAt = 6, kZeroAt = 7, kElementsAt = 8, kEntriesAt = 16, kCrcAt = 24,
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
  WriteNumber(payload, kCrcAt, 0, 4);
  WriteNumber(payload, kCrcAt, BitwiseCrc32(payload->data(), payload->size()), 4);
}

// The content of a payload, valid or not.
struct Content {
  std::vector<uint32_t> counts;  // one a block
  std::vector<uint16_t> runs;    // k, or none
  std::vector<uint64_t> values;  // their bits, k or none; of low-bit types, those of the float32 that they stand for
};

// Offsets of the sections after the counts.
struct Parts {
  size_t bitmap, runs, values, end;
};

inline size_t RoundUp(size_t size, size_t multiple) {
  while (size % multiple != 0) ++size;
  return size;
}

// For low-bit types the bits per entry, which equal the levels per group; 0 for other types.
inline size_t CodeBitsOf(DType dtype) { return dtype == DType::kInt2 ? 2 : dtype == DType::kInt1 ? 1 : 0; }

inline size_t GroupsOf(const Segments& segments) {
  size_t groups = 0;
  for (const Segment& segment : segments) groups += static_cast<size_t>(segment.channels);
  return segments.empty() ? 1 : groups;
}

// A group: segment and channel. Pairs compare in the order of groups.
using Group = std::pair<size_t, int64_t>;

inline Group GroupOf(const Segments& segments, int64_t index) {
  if (segments.empty()) return {0, 0};
  size_t at = 0;
  while (at + 1 < segments.size() && segments[at + 1].begin <= index) ++at;
  return {at, (index - segments[at].begin) % segments[at].channels};
}

// The bytes of the levels in a low-bit section.
inline size_t LevelsSize(DType dtype, size_t k, const Segments& segments) {
  return 4 * CodeBitsOf(dtype) * std::min(k, GroupsOf(segments));
}

// The values of entries at `indices`, by their bits, in a section of its own: levels in the order of groups, the
// smaller first, then the codes.
inline Bytes BuildLowBit(DType dtype, const std::vector<int64_t>& indices, const std::vector<uint64_t>& values,
                         const Segments& segments) {
  const size_t code_bits = CodeBitsOf(dtype);
  std::map<Group, std::set<uint64_t>> magnitudes;
  for (size_t j = 0; j < indices.size(); ++j) {
    magnitudes[GroupOf(segments, indices[j])].insert(values[j] & 0x7fffffffu);
  }
  Bytes section;
  for (const auto& [group, found] : magnitudes) {
    AppendNumber(&section, *found.begin(), 4);
    if (code_bits == 2) AppendNumber(&section, *found.rbegin(), 4);
  }
  const size_t codes = LevelsSize(dtype, indices.size(), segments);
  section.resize(codes + RoundUp(code_bits * indices.size(), 8) / 8);
  for (size_t j = 0; j < indices.size(); ++j) {
    const bool second = (values[j] & 0x7fffffffu) != *magnitudes[GroupOf(segments, indices[j])].begin();
    const uint64_t code = values[j] >> 31 | (second ? 2u : 0u);
    for (size_t bit = 0; bit < code_bits; ++bit) {
      const size_t place = code_bits * j + bit;
      section[codes + place / 8] |= static_cast<uint8_t>((code >> bit & 1u) << place % 8);
    }
  }
  return section;
}

// The bits of the float32 that a section of any bytes spells, from byte `at` on.
inline std::vector<uint64_t> ParseLowBit(DType dtype, const std::vector<int64_t>& indices, const Segments& segments,
                                         const Bytes& bytes, size_t at) {
  const size_t code_bits = CodeBitsOf(dtype), codes = at + LevelsSize(dtype, indices.size(), segments);
  std::map<Group, size_t> places;  // of a group's first level
  for (const int64_t index : indices) places[GroupOf(segments, index)] = 0;
  for (auto& [group, place] : places) {
    place = at;
    at += 4 * code_bits;
  }
  const auto bit_at = [&](size_t place) { return static_cast<size_t>(bytes[codes + place / 8] >> place % 8 & 1); };
  std::vector<uint64_t> values;
  for (size_t j = 0; j < indices.size(); ++j) {
    const size_t which = code_bits == 2 ? bit_at(2 * j + 1) : 0;
    const uint64_t level = ReadNumber(bytes, places[GroupOf(segments, indices[j])] + 4 * which, 4);
    values.push_back((level & 0x7fffffffu) | uint64_t{bit_at(code_bits * j)} << 31);
  }
  return values;
}

// The smallest number of low bits that minimises k * low + ((n - 1) >> low) + k.
inline uint64_t LowBitsOf(uint64_t n, uint64_t k) {
  uint64_t best = 0;
  for (uint64_t low = 0; low < 60; ++low) {
    if (k * low + ((n - 1) >> low) + k < k * best + ((n - 1) >> best) + k) best = low;
  }
  return best;
}

inline size_t LowerSize(size_t n, size_t k) { return (k * LowBitsOf(n, k) + 7) / 8; }
inline size_t UpperBits(size_t n, size_t k) { return ((n - 1) >> LowBitsOf(n, k)) + k; }

// The size of positions in one of the codings other than kAuto.
inline size_t PlacesSize(Coding coding, size_t n, size_t k) {
  const size_t blocks = n / 65536 + (n % 65536 != 0 ? 1 : 0);
  if (coding == Coding::kEliasFano) return LowerSize(n, k) + (UpperBits(n, k) + 7) / 8;
  if (coding == Coding::kBitmap) return (n + 7) / 8;
  return coding == Coding::kDense ? 0 : RoundUp(2 * blocks + (k >= 65536 ? (blocks + 7) / 8 : 0), 2) + 2 * k;
}

// What a header says: never kAuto.
inline Coding CodingOf(const PayloadFormat& format) {
  const auto size = [&](Coding coding) {
    return PlacesSize(coding, static_cast<size_t>(format.n), static_cast<size_t>(format.k));
  };
  if (format.coding != Coding::kAuto) return format.coding;
  if (format.k == format.n) return Coding::kDense;
  const size_t least = std::min({size(Coding::kBitmap), size(Coding::kEliasFano), size(Coding::kRunLength)});
  if (size(Coding::kBitmap) == least) return Coding::kBitmap;
  return size(Coding::kEliasFano) == least ? Coding::kEliasFano : Coding::kRunLength;
}

inline Parts PartsOf(const PayloadFormat& format) {
  const auto n = static_cast<size_t>(format.n), k = static_cast<size_t>(format.k);
  const size_t code_bits = CodeBitsOf(format.dtype);
  const size_t width = code_bits > 0 ? 4 : static_cast<size_t>(ItemSize(format.dtype));
  const Coding coding = CodingOf(format);
  Parts parts{kCountsAt, kCountsAt, 0, 0};
  if (coding == Coding::kRunLength) {
    const size_t blocks = n / 65536 + (n % 65536 != 0 ? 1 : 0);
    parts.bitmap = kCountsAt + 2 * blocks;
    parts.runs = RoundUp(parts.bitmap + (k >= 65536 ? RoundUp(blocks, 8) / 8 : 0), 2);
  }
  parts.values = RoundUp(kCountsAt + PlacesSize(coding, n, k), std::max<size_t>(1, width));
  const size_t low_bit = LevelsSize(format.dtype, k, format.segments) + RoundUp(code_bits * k, 8) / 8;
  parts.end = RoundUp(parts.values + (code_bits > 0 ? low_bit : width * k), 8);
  return parts;
}

inline Bytes PackBits(const std::vector<bool>& bits) {
  Bytes bytes((bits.size() + 7) / 8);
  for (size_t i = 0; i < bits.size(); ++i) bytes[i / 8] |= static_cast<uint8_t>((bits[i] ? 1u : 0u) << i % 8);
  return bytes;
}

inline bool BitAt(const Bytes& bytes, size_t at, size_t bit) { return (bytes[at + bit / 8] >> bit % 8 & 1) != 0; }

// The low bits of each one after the other; then in unary by how much the rest grows, and a bit that is set.
inline Bytes BuildEliasFano(int64_t n, const std::vector<int64_t>& indices) {
  const uint64_t low = LowBitsOf(static_cast<uint64_t>(n), indices.size()), last = static_cast<uint64_t>(n - 1) >> low;
  std::vector<bool> lower, upper;
  uint64_t rest = 0;
  for (const int64_t index : indices) {
    for (uint64_t bit = 0; bit < low; ++bit) lower.push_back((index >> bit & 1) != 0);
    for (; rest < static_cast<uint64_t>(index) >> low; ++rest) upper.push_back(false);
    upper.push_back(true);
  }
  for (; rest < last; ++rest) upper.push_back(false);
  Bytes bytes = PackBits(lower);
  const Bytes tail = PackBits(upper);
  bytes.insert(bytes.end(), tail.begin(), tail.end());
  return bytes;
}

// What `bytes` from `at` on spell, in any order; false unless there are k. Padding behind the low bits may be anything.
inline bool ParseEliasFano(int64_t n, int64_t k, const Bytes& bytes, size_t at, std::vector<int64_t>* indices) {
  const auto many = static_cast<size_t>(k), size = static_cast<size_t>(n), low = size_t{LowBitsOf(size, many)};
  const size_t upper = at + LowerSize(size, many), bits = UpperBits(size, many);
  int64_t rest = 0;
  for (size_t bit = 0; bit < RoundUp(bits, 8); ++bit) {
    if (!BitAt(bytes, upper, bit)) {
      ++rest;
      continue;
    }
    if (bit >= bits || indices->size() == many) return false;
    int64_t index = rest;
    for (size_t i = low; i-- > 0;) index = 2 * index + (BitAt(bytes, at, indices->size() * low + i) ? 1 : 0);
    indices->push_back(index);
  }
  return indices->size() == many;
}

inline Bytes BuildBitmap(int64_t n, const std::vector<int64_t>& indices) {
  std::vector<bool> bits(static_cast<size_t>(n));
  for (const int64_t index : indices) bits[static_cast<size_t>(index)] = true;
  return PackBits(bits);
}

inline bool ParseBitmap(int64_t n, int64_t k, const Bytes& bytes, size_t at, std::vector<int64_t>* indices) {
  for (int64_t i = 0; i < (n + 7) / 8 * 8; ++i) {
    if (!BitAt(bytes, at, static_cast<size_t>(i))) continue;
    if (i >= n || static_cast<int64_t>(indices->size()) == k) return false;
    indices->push_back(i);
  }
  return static_cast<int64_t>(indices->size()) == k;
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
  return {'H', 'V', 'D', 'S', 1, static_cast<uint8_t>(CodingOf(format)), static_cast<uint8_t>(format.dtype), 0};
}

inline Bytes BuildPayload(const PayloadFormat& format, const Content& content) {
  const Parts parts = PartsOf(format);
  Bytes bytes = StartOf(format);
  AppendNumber(&bytes, static_cast<uint64_t>(format.n), 8);
  AppendNumber(&bytes, content.runs.size(), 8);
  AppendNumber(&bytes, 0, 8);
  const Coding coding = CodingOf(format);
  if (coding == Coding::kRunLength) {
    for (const uint32_t count : content.counts) AppendNumber(&bytes, count % 65536, 2);
    bytes.resize(parts.runs);
    for (size_t block = 0; block < content.counts.size() && format.k >= 65536; ++block) {
      if (content.counts[block] == 65536) bytes[parts.bitmap + block / 8] |= static_cast<uint8_t>(1 << block % 8);
    }
    for (const uint16_t run : content.runs) AppendNumber(&bytes, run, 2);
  } else if (coding != Coding::kDense && !content.runs.empty()) {
    const bool bitmap = coding == Coding::kBitmap;
    const Bytes section = (bitmap ? BuildBitmap : BuildEliasFano)(format.n, PlacesOf(content));
    bytes.insert(bytes.end(), section.begin(), section.end());
  }
  bytes.resize(parts.values);
  if (CodeBitsOf(format.dtype) > 0) {
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
inline bool ParseRunLengths(const PayloadFormat& format, const Bytes& bytes, uint64_t entries,
                            std::vector<int64_t>* indices) {
  const Parts parts = PartsOf(format);
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

// Do the positions, in whatever coding, say where `entries` entries are?
inline bool ParsePlaces(const PayloadFormat& format, const Bytes& bytes, uint64_t entries,
                        std::vector<int64_t>* indices) {
  const Coding coding = CodingOf(format);
  if (coding == Coding::kRunLength) return ParseRunLengths(format, bytes, entries, indices);
  if (entries == 0) {
    const size_t size = PlacesSize(coding, static_cast<size_t>(format.n), static_cast<size_t>(format.k));
    return std::count(bytes.begin() + kCountsAt, bytes.begin() + static_cast<long>(kCountsAt + size), 0) ==
           static_cast<long>(size);
  }
  if (coding == Coding::kDense) {
    for (int64_t i = 0; i < format.n; ++i) indices->push_back(i);
    return true;
  }
  const bool bitmap = coding == Coding::kBitmap;
  if (!(bitmap ? ParseBitmap : ParseEliasFano)(format.n, format.k, bytes, kCountsAt, indices)) return false;
  for (size_t j = 0; j < indices->size(); ++j) {
    if ((*indices)[j] >= format.n || (j > 0 && (*indices)[j] <= (*indices)[j - 1])) return false;
  }
  return true;
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
  if (CodeBitsOf(format.dtype) > 0) {
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
