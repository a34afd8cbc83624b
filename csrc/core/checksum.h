// CRC-32 (IEEE 802.3, the one of zlib and PNG).
#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd_sparse {

// The checksum of `size` bytes that follow bytes whose checksum is `crc` (0 at the start).
uint32_t Crc32(const void* data, size_t size, uint32_t crc = 0);

}  // namespace hvd_sparse
