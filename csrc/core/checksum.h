// CRC-32 (IEEE 802.3, the one of zlib and PNG).
#pragma once

#include <cstddef>
#include <cstdint>

#include "host_device.h"

namespace hvd_sparse {

// The checksum of `size` bytes that follow bytes whose checksum is `crc` (0 at the start).
uint32_t Crc32(const void* data, size_t size, uint32_t crc = 0);

// Below, what sums parts that are read at the same time. A part's remainder is that of its bytes alone, without the
// inversions at start and end; bit 31 is the coefficient of x^0. Of parts A and B, one after the other:
//   remainder(AB) = Shift(remainder(A), bytes of B) ^ remainder(B)        Crc32(A) = ~(Shift(~0, bytes) ^ remainder(A))
constexpr uint32_t kCrcPolynomial = 0xEDB88320u;

// The product modulo the polynomial.
HVD_SPARSE_HD constexpr uint32_t CrcMultiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1u) != 0 ? kCrcPolynomial : 0u);
  }
  return product;
}

struct CrcPowers {
  static constexpr int kCount = 52;  // payloads are below 2^52 bytes
  uint32_t of[kCount];               // x^(8 * 2^j) modulo the polynomial
};

constexpr CrcPowers MakeCrcPowers() {
  CrcPowers powers{};
  powers.of[0] = 0x00800000u;  // x^8
  for (int j = 1; j < CrcPowers::kCount; ++j) powers.of[j] = CrcMultiply(powers.of[j - 1], powers.of[j - 1]);
  return powers;
}

// What is shared out in chunks of equal size, counted from the end: x^(8 * kBytes * j) for the j-th.
struct CrcChunks {
  static constexpr int kBytes = 256;
  static constexpr int kCount = 256;
  uint32_t of[kCount];
};

constexpr CrcChunks MakeCrcChunks() {
  CrcChunks chunks{};
  uint32_t step = 0x80000000u;  // 1
  for (int byte = 0; byte < CrcChunks::kBytes; ++byte) step = CrcMultiply(step, 0x00800000u);
  chunks.of[0] = 0x80000000u;
  for (int j = 1; j < CrcChunks::kCount; ++j) chunks.of[j] = CrcMultiply(chunks.of[j - 1], step);
  return chunks;
}

// The remainder after so many zero bytes more.
HVD_SPARSE_HD constexpr uint32_t CrcShift(uint32_t remainder, uint64_t bytes, const CrcPowers& powers) {
  for (int j = 0; bytes != 0; bytes >>= 1, ++j) {
    if ((bytes & 1u) != 0) remainder = CrcMultiply(remainder, powers.of[j]);
  }
  return remainder;
}

// What one byte contributes, for tables.
HVD_SPARSE_HD constexpr uint32_t CrcOfByte(uint32_t byte) {
  for (int bit = 0; bit < 8; ++bit) byte = (byte >> 1) ^ ((byte & 1u) != 0 ? kCrcPolynomial : 0u);
  return byte;
}

}  // namespace hvd_sparse
