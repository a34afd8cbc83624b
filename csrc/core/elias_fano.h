// Positions near the entropy bound: Elias and Fano's code of strictly ascending numbers, and plain bitmaps.
//
// Elias-Fano cuts each index into low bits, as many for all, which are stored one after the other, and the rest, whose
// increments are stored in unary: bit (index >> low) + j of the upper section is set for entry j. It takes half a bit
// an entry more than log2(C(n, k)) / k, whatever the indices are: the size is a function of n and k alone.
#pragma once

#include <cstdint>

#include "status.h"

namespace hvd_sparse {

// How many low bits make it shortest: the fewest where two numbers do.
int EliasFanoLowBits(int64_t n, int64_t k);

// Bytes of the low bits and of the upper section, each padded with zero bits. 0 < k <= n.
int64_t EliasFanoLowerSize(int64_t n, int64_t k);
int64_t EliasFanoSize(int64_t n, int64_t k);

// `indices`: k of [0, n), strictly ascending (not checked). Writes EliasFanoSize bytes, of which all were zero.
void EncodeEliasFano(const int64_t* indices, int64_t k, int64_t n, uint8_t* out);

// Writes indices[k]. CorruptPayload unless there are k of them and nothing behind; they may be any, in any order.
Status DecodeEliasFano(const uint8_t* section, int64_t k, int64_t n, int64_t* indices);

// The same as (n + 7) / 8 bytes: bit i % 8 of byte i / 8 for element i.
inline int64_t BitmapSize(int64_t n) { return (n + 7) / 8; }
void EncodeBitmap(const int64_t* indices, int64_t k, uint8_t* out);
Status DecodeBitmap(const uint8_t* section, int64_t k, int64_t n, int64_t* indices);

}  // namespace hvd_sparse
