#include "elias_fano.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace hvd_sparse {
namespace {

int64_t UpperBits(int64_t n, int64_t k, int low) { return ((n - 1) >> low) + k; }

int64_t Bytes(int64_t bits) { return (bits + 7) / 8; }

// Reads a little-endian word. Bytes at `end` and beyond count as zero.
uint64_t ReadWord(const uint8_t* at, const uint8_t* end) {
  uint64_t word = 0;
  if (end - at >= 8) {  // a copy of known size is one load
    std::memcpy(&word, at, 8);
  } else {
    std::memcpy(&word, at, static_cast<size_t>(end - at));
  }
  return word;
}

// Calls found(position) for each of the first k set bits. Returns CorruptPayload unless exactly k bits are set, all
// below position `bits`.
template <typename Found>
Status FindBits(const uint8_t* section, int64_t bits, int64_t k, Found&& found) {
  const uint8_t* end = section + Bytes(bits);
  int64_t j = 0;
  for (int64_t base = 0; base < bits; base += 64) {
    for (uint64_t word = ReadWord(section + base / 8, end); word != 0; word &= word - 1, ++j) {
      const int64_t position = base + __builtin_ctzll(word);
      if (j == k || position >= bits)
        return Status::CorruptPayload("there are more than " + std::to_string(k) + " bits");
      found(j, position);
    }
  }
  if (j == k) return Status::Ok();
  return Status::CorruptPayload("there are " + std::to_string(j) + " bits, not " + std::to_string(k));
}

}  // namespace

int EliasFanoLowBits(int64_t n, int64_t k) {
  int low = 0;  // one bit more costs k bits, and saves half of the zeros of the upper section, rounded up
  while ((((n - 1) >> low) + 1) / 2 > k) ++low;
  return low;
}

int64_t EliasFanoLowerSize(int64_t n, int64_t k) { return Bytes(k * EliasFanoLowBits(n, k)); }

int64_t EliasFanoSize(int64_t n, int64_t k) {
  return EliasFanoLowerSize(n, k) + Bytes(UpperBits(n, k, EliasFanoLowBits(n, k)));
}

void EncodeEliasFano(const int64_t* indices, int64_t k, int64_t n, uint8_t* out) {
  EliasFanoWriter writer(n, k, out);
  for (int64_t j = 0; j < k; ++j) writer.Put(indices[j]);
  writer.Finish();
}

Status DecodeEliasFano(const uint8_t* section, int64_t k, int64_t n, int64_t* indices) {
  const int low = EliasFanoLowBits(n, k);
  const uint8_t* upper = section + EliasFanoLowerSize(n, k);
  const uint64_t mask = (uint64_t{1} << low) - 1;
  return FindBits(upper, UpperBits(n, k, low), k, [&](int64_t j, int64_t position) {
    const int64_t bit = j * low;
    const uint64_t word = ReadWord(section + bit / 8, upper) >> (bit % 8);  // low <= 48 bits
    indices[j] = (position - j) << low | static_cast<int64_t>(word & mask);
  });
}

void EncodeBitmap(const int64_t* indices, int64_t k, uint8_t* out) {
  for (int64_t j = 0; j < k; ++j) out[indices[j] / 8] |= static_cast<uint8_t>(1u << (indices[j] % 8));
}

Status DecodeBitmap(const uint8_t* section, int64_t k, int64_t n, int64_t* indices) {
  return FindBits(section, n, k, [&](int64_t j, int64_t position) { indices[j] = position; });
}

}  // namespace hvd_sparse
