#include "checksum.h"

#include <array>

// No x86-64 level includes carry-less multiplication, so the code tests for it at run time.
#if defined(__x86_64__) && defined(__GNUC__)
#define HVD_SPARSE_FOLDS
#include <immintrin.h>
#endif

namespace hvd_sparse {
namespace {

constexpr size_t kSlices = 8;
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// tables[s][b]: the contribution of byte b followed by s bytes. With eight tables, a step reads eight bytes.
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

#ifdef HVD_SPARSE_FOLDS

constexpr size_t kLane = 16;
constexpr size_t kLanes = 4;  // enough to hide the latency of a multiplication
constexpr CrcPowers kPowers = MakeCrcPowers();

// Returns x^(8 * bytes) modulo the polynomial, shifted by one bit: the product of two bit-reversed numbers is one bit
// too far to the right.
constexpr int64_t FoldFactor(uint64_t bytes) {
  return static_cast<int64_t>(uint64_t{CrcShift(0x80000000u, bytes, kPowers)} << 1);
}

// Shifts a lane by `bytes` and adds the lane `there`. Modulo the polynomial, the first half is multiplied by
// x^(8 * bytes + 32), and the second half, which is half a lane closer, by x^(8 * bytes - 32).
template <uint64_t bytes>
__attribute__((target("pclmul,sse4.1"))) inline __m128i Fold(__m128i lane, __m128i there) {
  constexpr int64_t kFirst = FoldFactor(bytes + 4);
  constexpr int64_t kSecond = FoldFactor(bytes - 4);
  const __m128i factors = _mm_set_epi64x(kSecond, kFirst);
  const __m128i first = _mm_clmulepi64_si128(lane, factors, 0x00);
  return _mm_xor_si128(_mm_xor_si128(first, _mm_clmulepi64_si128(lane, factors, 0x11)), there);
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i Load(const uint8_t* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

// Folds all complete lanes, at least four, into one with the same remainder (Gopal et al., Fast CRC Computation for
// Generic Polynomials Using PCLMULQDQ Instruction, 2009). Returns the number of bytes read.
__attribute__((target("pclmul,sse4.1"))) size_t FoldLanes(const uint8_t* bytes, size_t size, uint32_t crc,
                                                          uint8_t* folded) {
  __m128i lanes[kLanes];
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = Load(bytes + i * kLane);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  size_t done = kLanes * kLane;
  for (; done + kLanes * kLane <= size; done += kLanes * kLane) {
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = Fold<kLanes * kLane>(lanes[i], Load(bytes + done + i * kLane));
  }
  __m128i one = lanes[0];
  for (size_t i = 1; i < kLanes; ++i) one = Fold<kLane>(one, lanes[i]);
  for (; done + kLane <= size; done += kLane) one = Fold<kLane>(one, Load(bytes + done));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(folded), one);
  return done;
}

#endif

// Continues the remainder `crc`, eight bytes at a time.
uint32_t Remainder(const uint8_t* bytes, size_t size, uint32_t crc) {
  for (; size >= kSlices; size -= kSlices, bytes += kSlices) {
    uint32_t next = 0;
    for (size_t i = 0; i < kSlices; ++i) {
      const uint8_t mixed = i < 4 ? static_cast<uint8_t>(bytes[i] ^ (crc >> (8 * i))) : bytes[i];
      next ^= kTables[kSlices - 1 - i][mixed];
    }
    crc = next;
  }
  for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xffu];
  return crc;
}

}  // namespace

uint32_t Crc32(const void* data, size_t size, uint32_t crc) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  crc = ~crc;
#ifdef HVD_SPARSE_FOLDS
  static const bool kFolds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (kFolds && size >= kLanes * kLane) {
    uint8_t folded[kLane];
    const size_t done = FoldLanes(bytes, size, crc, folded);
    crc = Remainder(folded, kLane, 0);
    bytes += done;
    size -= done;
  }
#endif
  return ~Remainder(bytes, size, crc);
}

}  // namespace hvd_sparse
