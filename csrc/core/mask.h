// Payloads of the elements of a matrix that a mask selects: positions and values, or values only if the receiver has
// the mask.
#pragma once

#include "byte_mask.h"
#include "payload.h"

namespace hvd_sparse {

int64_t CountKept(const uint8_t* mask, int64_t n);

// Returns the format of a payload of `kept` values without positions. If kept is 0, it is that of an empty one, n = 1.
PayloadFormat KeptFormat(int64_t kept, DType dtype);

// Packs the values that mask[values.size] selects, with positions: PayloadSize bytes. The format has n = values.size
// and k = kept; if kept is 0, it is that of an empty payload, k = 1. Returns InvalidArgument if their number or their
// type differs from the format.
Status PackMasked(const PayloadFormat& format, const Array& values, const uint8_t* mask, uint8_t* payload);

// Packs the selected values without positions; the format is KeptFormat(kept, ...).
Status PackMaskedValues(const PayloadFormat& format, const Array& values, const uint8_t* mask, uint8_t* payload);

// Unpacks a payload to values[format.n], of the payload's type, and mask[format.n], with zeros elsewhere.
Status UnpackMasked(const PayloadFormat& format, const uint8_t* payload, int64_t size, void* values, uint8_t* mask);

// Unpacks a payload without positions to the elements of values[n] that mask[n] selects, with zeros elsewhere. Returns
// CorruptPayload if the number of values differs from the mask's.
Status UnpackMaskedValues(DType dtype, const uint8_t* payload, int64_t size, const uint8_t* mask, int64_t n,
                          void* values);

}  // namespace hvd_sparse
