// A payload: header | positions | values. Its size depends only on the format (n, k, coding, dtype, segments). Equal
// settings on all ranks give equal sizes, so one collective suffices, without an exchange of sizes.
//
// All numbers are little-endian. Header, 32 bytes:
//    0  u32  magic "HVDS"          4  u8  version    5  u8  coding    6  u8  value dtype    7  u8  zero
//    8  u64  n, elements          16  u64 entries: k, or 0 for an empty contribution of the same size
//   24  u32  CRC-32 of the payload with this field zero                                    28  u32 zero
// The header is followed by the positions, padded with zero bytes to a multiple of the size of a value, and by
// values[k], padded to a multiple of 8.
//
// Positions as run lengths: for each block a u16 count modulo 65,536; if k >= 65,536, a bitmap of the blocks that hold
// 65,536 entries, padded to a multiple of 2; u16 run lengths[k]. Elias-Fano codes and bitmaps: see elias_fano.h. With
// kDense, k = n, there are no positions because all elements are sent.
//
// Without values (dtype kNone), a payload is a set of indices. Low-bit values start at a multiple of 4, see low_bit.h.
#pragma once

#include <vector>

#include "dtype.h"
#include "low_bit.h"
#include "positions.h"
#include "status.h"

namespace hvd_sparse {

// k is the room for entries, at least 1, and determines the size. A payload has k entries, or none. Where the number of
// entries varies, k does, too; with nothing to send, k is 1 and there are no entries.
struct PayloadFormat {
  int64_t n = 0;
  int64_t k = 0;
  Coding coding = Coding::kRunLength;
  DType dtype = DType::kFloat32;  // of the values on the wire
  Segments segments = {};         // groups of the levels of low-bit values
};

// Computes the size in bytes. Returns InvalidArgument unless 0 < k <= n, k = n for kDense, and the segments fit n.
Status PayloadSize(const PayloadFormat& format, int64_t* size);

// Writes exactly PayloadSize bytes. `entries` is k or 0. `values` are float64 for the wire dtype float64, else float32;
// for low-bit types they must be a result of QuantizeLowBit; for kNone they are not read.
Status Pack(const PayloadFormat& format, const int64_t* indices, const void* values, int64_t entries, uint8_t* payload);

// A view of a validated payload. Whatever its bytes are, reads through the view stay inside the payload and the tensor.
struct PayloadView {
  int64_t entries = 0;
  Positions positions;
  const uint8_t* values = nullptr;
  std::vector<float> low_bit;  // low-bit values, decoded
};

// Checks everything that decoding relies on: size, header against `format`, checksum, counts, runs.
Status Validate(const PayloadFormat& format, const uint8_t* payload, int64_t size, PayloadView* view);

// The same, but returns the positions as ascending indices, and leaves view.positions empty.
Status ValidateIndices(const PayloadFormat& format, const uint8_t* payload, int64_t size, PayloadView* view,
                       std::vector<int64_t>* indices);

// Returns an error that names the rank whose payload is at fault.
Status FromRank(int64_t rank, Status status);

constexpr int64_t kMostRanks = int64_t{1} << 23;

// Returns an error if a number of ranks is not in [1, kMostRanks].
Status CheckRanks(int64_t ranks);

// Locates payloads whose number of entries differs between ranks. `gathered` has the concatenated messages of all
// ranks. A message has a payload of members[0], members[1], ..., whose k may differ from the members' k. Sets
// offsets[rank * members.size() + member] to the start of each payload, and its k to the number of entries, at least 1.
// Checks only the fields that it reads, and that no bytes are left over. A damaged number of entries moves all payloads
// after it, so an error names the rank of the first payload that is damaged itself.
Status LocatePayloads(std::vector<PayloadFormat> members, int64_t ranks, const uint8_t* gathered, int64_t size,
                      int64_t* offsets, int64_t* ks);

// Writes `view.entries` indices and values: float64 for the wire dtype float64, else float32; zeros for kNone.
void Unpack(const PayloadFormat& format, const PayloadView& view, int64_t* indices, void* values);

// Validates and unpacks in one pass. Writes up to format.k indices and values, and their number to `entries`. If the
// payload is refused, a part of the output may have been written.
Status UnpackChecked(const PayloadFormat& format, const uint8_t* payload, int64_t size, int64_t* indices, void* values,
                     int64_t* entries);

// The j-th value as float32.
float ValueAt(const PayloadView& view, DType dtype, int64_t j);

}  // namespace hvd_sparse
