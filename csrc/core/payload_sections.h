// The byte offsets of a payload's sections, for code that writes or reads it in parallel.
#pragma once

#include <cstddef>

#include "payload.h"

namespace hvd_sparse {

constexpr uint32_t kMagic = 0x53445648u;  // "HVDS"
constexpr uint8_t kVersion = 1;

struct Header {
  uint32_t magic;
  uint8_t version;
  uint8_t coding;
  uint8_t dtype;
  uint8_t zero;
  uint64_t n;
  uint64_t entries;
  uint32_t checksum;
  uint32_t zero_too;
};
static_assert(sizeof(Header) == 32 && offsetof(Header, checksum) == 24, "the header is part of the wire format");

constexpr int64_t kPositionsAt = sizeof(Header);
constexpr int64_t kChecksumAt = offsetof(Header, checksum);

// Returns the header of a payload with its checksum set to zero.
Header MakeHeader(const PayloadFormat& format, int64_t entries);

// Checks size, header and checksum, and reads the number of entries.
Status CheckBytes(const PayloadFormat& format, const uint8_t* payload, int64_t size, int64_t* entries);

// Returns the offset of the values.
int64_t ValuesAt(const PayloadFormat& format);

// Writes the header, with the checksum, before positions and values; values_crc: Crc32 of all bytes from ValuesAt on.
void SealAround(const PayloadFormat& format, int64_t entries, int64_t size, uint32_t values_crc, uint8_t* payload);

// Run lengths begin with u16 counts. These are the offsets of the bitmap of full blocks and of the u16 runs after it,
// from the start of the positions.
int64_t FullAt(int64_t n);
int64_t RunsAt(int64_t n, int64_t k);

}  // namespace hvd_sparse
