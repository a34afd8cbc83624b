#include "checksum.h"

#include <array>

namespace hvd_sparse {
namespace {

constexpr size_t kSlices = 8;
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// tables[s][b]: what byte b contributes when s bytes follow it, so that eight bytes are folded in at a time.
constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    tables[0][byte] = CrcOfByte(byte);
  }
  for (size_t slice = 1; slice < kSlices; ++slice) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xffu];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

}  // namespace

uint32_t Crc32(const void* data, size_t size, uint32_t crc) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; size >= kSlices; size -= kSlices, bytes += kSlices) {
    uint32_t next = 0;
    for (size_t i = 0; i < kSlices; ++i) {
      const uint8_t mixed = i < 4 ? static_cast<uint8_t>(bytes[i] ^ (crc >> (8 * i))) : bytes[i];
      next ^= kTables[kSlices - 1 - i][mixed];
    }
    crc = next;
  }
  for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xffu];
  return ~crc;
}

}  // namespace hvd_sparse
