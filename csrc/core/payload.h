// A payload: header | positions | values. Its size is a pure function of (n, k, coding, dtype),
// so that equal settings on all ranks give equal sizes, and one collective without a size exchange.
//
// Little-endian. Header, 32 bytes:
//    0  u32  magic "HVDS"          4  u8  version    5  u8  coding    6  u8  value dtype    7  u8  zero
//    8  u64  n, elements          16  u64 entries: k, or 0 for an empty contribution of the same size
//   24  u32  CRC-32 of the payload with this field zero                                    28  u32 zero
// Then, padded with zero bytes, positions, to a multiple of the value's size, and values[k], to a multiple of 8.
//
// Positions as run lengths: u16 counts modulo 65,536, one a block; if k >= 65,536 a bitmap of the blocks that hold
// 65,536 entries, to a multiple of 2; u16 run lengths[k]. Elias-Fano codes and bitmaps: see elias_fano.h. kDense, k =
// n: none, all elements are sent.
//
// Without values (dtype kNone) a payload is a set of indices. Low-bit values follow a multiple of 4, see low_bit.h.
#pragma once

#include <vector>

#include "dtype.h"
#include "low_bit.h"
#include "positions.h"
#include "status.h"

namespace hvd_sparse {

struct PayloadFormat {
  int64_t n = 0;
  int64_t k = 0;
  Coding coding = Coding::kRunLength;
  DType dtype = DType::kFloat32;  // of the values on the wire
  Segments segments = {};         // what shares the levels of low-bit values
};

// In bytes. InvalidArgument unless 0 < k <= n, k = n for kDense, and the segments fit n.
Status PayloadSize(const PayloadFormat& format, int64_t* size);

// Writes exactly PayloadSize bytes. `entries` is k or 0. `values` are float32, float64 for that wire dtype, unread for
// kNone, as QuantizeLowBit made them for low-bit types.
Status Pack(const PayloadFormat& format, const int64_t* indices, const void* values, int64_t entries, uint8_t* payload);

// A payload that has been checked: whatever it holds, reading it through this stays inside payload and tensor.
struct PayloadView {
  int64_t entries = 0;
  Positions positions;
  const uint8_t* values = nullptr;
  std::vector<float> low_bit;  // low-bit values, decoded
};

// Checks every byte that decoding relies on: size, header against `format`, checksum, counts, runs.
Status Validate(const PayloadFormat& format, const uint8_t* payload, int64_t size, PayloadView* view);

// For payloads whose number of entries differs between ranks: finds, in the messages of all ranks one after the other,
// each a payload of members[0], members[1], ... but for their k, where each payload starts,
// offsets[rank * members.size() + member], and its k, likewise: its entries, at least 1. Checks no more than what it
// reads to get there, and that nothing is left over.
Status LocatePayloads(std::vector<PayloadFormat> members, int64_t ranks, const uint8_t* gathered, int64_t size,
                      int64_t* offsets, int64_t* ks);

// Writes `view.entries` indices, and values as float32 (float64 for that wire dtype, zero for kNone).
void Unpack(const PayloadFormat& format, const PayloadView& view, int64_t* indices, void* values);

// Validate and Unpack together, without counts and runs in between: indices[format.k], values[format.k], and how many
// of them there are. Of a payload that is refused some may have been written.
Status UnpackChecked(const PayloadFormat& format, const uint8_t* payload, int64_t size, int64_t* indices, void* values,
                     int64_t* entries);

// The j-th value as float32.
float ValueAt(const PayloadView& view, DType dtype, int64_t j);

}  // namespace hvd_sparse
