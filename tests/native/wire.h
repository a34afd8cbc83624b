// The wire format a second time, byte by byte from the comment in payload.h, without a line of payload.cc.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
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
  std::vector<uint64_t> values;  // their bits, k or none
};

// Where the parts after the counts begin.
struct Parts {
  size_t bitmap, runs, values, end;
};

inline size_t RoundUp(size_t size, size_t multiple) {
  while (size % multiple != 0) ++size;
  return size;
}

inline Parts PartsOf(const PayloadFormat& format) {
  const auto n = static_cast<size_t>(format.n), k = static_cast<size_t>(format.k);
  const auto width = static_cast<size_t>(ItemSize(format.dtype));
  const size_t blocks = n / 65536 + (n % 65536 != 0 ? 1 : 0);
  Parts parts{};
  parts.bitmap = kCountsAt + 2 * blocks;
  parts.runs = RoundUp(parts.bitmap + (k >= 65536 ? RoundUp(blocks, 8) / 8 : 0), 2);
  parts.values = RoundUp(parts.runs + 2 * k, width);
  parts.end = RoundUp(parts.values + width * k, 8);
  return parts;
}

inline Bytes BuildPayload(const PayloadFormat& format, const Content& content) {
  const Parts parts = PartsOf(format);
  Bytes bytes{'H', 'V', 'D', 'S', 1, 0, static_cast<uint8_t>(format.dtype), 0};
  AppendNumber(&bytes, static_cast<uint64_t>(format.n), 8);
  AppendNumber(&bytes, content.runs.size(), 8);
  AppendNumber(&bytes, 0, 8);
  for (const uint32_t count : content.counts) AppendNumber(&bytes, count % 65536, 2);
  bytes.resize(parts.runs);
  for (size_t block = 0; block < content.counts.size() && format.k >= 65536; ++block) {
    if (content.counts[block] == 65536) bytes[parts.bitmap + block / 8] |= static_cast<uint8_t>(1 << block % 8);
  }
  for (const uint16_t run : content.runs) AppendNumber(&bytes, run, 2);
  bytes.resize(parts.values);
  for (const uint64_t value : content.values) AppendNumber(&bytes, value, static_cast<int>(ItemSize(format.dtype)));
  bytes.resize(parts.end);
  Seal(&bytes);
  return bytes;
}

// Is `bytes` a payload of `format`? Then also where its entries are, and their bits. Each entry is placed by hand.
inline bool ParsePayload(const PayloadFormat& format, const Bytes& bytes, std::vector<int64_t>* indices,
                         std::vector<uint64_t>* values) {
  const Parts parts = PartsOf(format);
  const int width = static_cast<int>(ItemSize(format.dtype));
  if (bytes.size() != parts.end) return false;
  Bytes sealed = bytes;
  Seal(&sealed);
  const Bytes start{'H', 'V', 'D', 'S', 1, 0, static_cast<uint8_t>(format.dtype), 0};
  const uint64_t entries = ReadNumber(bytes, kEntriesAt, 8);
  if (sealed != bytes || !std::equal(start.begin(), start.end(), bytes.begin())) return false;
  if (ReadNumber(bytes, kElementsAt, 8) != static_cast<uint64_t>(format.n)) return false;
  if (ReadNumber(bytes, kZeroTooAt, 4) != 0) return false;
  if (entries != 0 && entries != static_cast<uint64_t>(format.k)) return false;
  indices->clear();
  values->clear();
  uint64_t j = 0;
  for (size_t block = 0; block < (parts.bitmap - kCountsAt) / 2; ++block) {
    uint64_t count = ReadNumber(bytes, kCountsAt + 2 * block, 2);
    const bool full = format.k >= 65536 && (bytes[parts.bitmap + block / 8] >> block % 8 & 1) != 0;
    if (full) count += 65536;
    auto position = static_cast<int64_t>(65536 * block);
    const int64_t end = std::min(position + 65536, format.n);
    for (uint64_t i = 0; i < count; ++i, ++j, ++position) {
      if (j >= entries) return false;
      position += static_cast<int64_t>(ReadNumber(bytes, parts.runs + 2 * j, 2));
      if (position >= end) return false;
      indices->push_back(position);
      values->push_back(ReadNumber(bytes, parts.values + static_cast<size_t>(width) * j, width));
    }
  }
  return j == entries;
}

}  // namespace hvd_sparse
