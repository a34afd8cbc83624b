// Decode-and-add of the payloads of all ranks.
#pragma once

#include "parallel.h"
#include "payload.h"
#include "status.h"

namespace hvd_sparse {

// Payload `r` of `format` starts at gathered + r * stride, for r in [0, ranks). Sets out[n] to
// the sum of scale * decoded payload, added in rank order whatever the number of threads: bit-identical on every
// rank. All payloads are validated before `out` is touched; the message of an error names the rank.
Status ReducePayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                      const ParallelFor& parallel_for, float* out);

}  // namespace hvd_sparse
