// CRC-32 (IEEE 802.3), as used by zlib and PNG.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host_device.h"

namespace hvd_sparse {

// Returns the checksum of `size` bytes. `crc` is the checksum of the preceding bytes, 0 at the start.
uint32_t Crc32(const void* data, size_t size, uint32_t crc = 0);

// The functions below combine the remainders of parts that are read in parallel. The remainder of a part depends only
// on its own bytes and omits the inversions at start and end. Bit 31 is the coefficient of x^0. For part A followed by
// part B:
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

// Factors for data divided into chunks of kBytes, counted from the end: x^(8 * kBytes * j) for chunk j.
struct CrcChunks {
  static constexpr int kBytes = 64;
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

// Returns the remainder after `bytes` further zero bytes.
HVD_SPARSE_HD constexpr uint32_t CrcShift(uint32_t remainder, uint64_t bytes, const CrcPowers& powers) {
  for (int j = 0; bytes != 0; bytes >>= 1, ++j) {
    if ((bytes & 1u) != 0) remainder = CrcMultiply(remainder, powers.of[j]);
  }
  return remainder;
}

// Returns the remainder of a single byte, for lookup tables.
HVD_SPARSE_HD constexpr uint32_t CrcOfByte(uint32_t byte) {
  for (int bit = 0; bit < 8; ++bit) byte = (byte >> 1) ^ ((byte & 1u) != 0 ? kCrcPolynomial : 0u);
  return byte;
}

}  // namespace hvd_sparse
