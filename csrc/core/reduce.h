// Decode-and-add of the payloads of all ranks.
#pragma once

#include <vector>

#include "parallel.h"
#include "payload.h"
#include "status.h"

namespace hvd_sparse {

// A payload of one rank.
struct Source {
  const uint8_t* payload;
  int64_t k;
  int64_t size;  // in bytes
};

// Where elements [begin, begin + size) of a sum go.
struct Slice {
  int64_t begin;
  int64_t size;
  float* out;
};

// Sets the slices, which ascend and do not overlap, to their part of the sum of scale * decoded payload, as below; what
// is in no slice is left out. `format.k` is that of each source.
Status ReduceSources(PayloadFormat format, const std::vector<Source>& sources, float scale,
                     const ParallelFor& parallel_for, const std::vector<Slice>& slices);

// The same for messages whose payloads LocatePayloads found, of the members that have a place for their sum: outs[i],
// members[i].n elements, null for none. An error tells of the first member whose payload fails; sums of members before
// it are then written.
Status ReduceLocated(const std::vector<PayloadFormat>& members, int64_t ranks, const uint8_t* gathered, int64_t size,
                     float scale, const ParallelFor& parallel_for, const std::vector<float*>& outs);

// Payload `r` of `format` starts at gathered + r * stride, for r in [0, ranks). Sets out[n] to
// the sum of scale * decoded payload, added in rank order whatever the number of threads: bit-identical on every
// rank. All payloads are validated before `out` is touched; the message of an error names the rank.
Status ReducePayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                      const ParallelFor& parallel_for, float* out);

// The same as ReducePayloads, but for where the sum goes.
Status ReducePayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                      const ParallelFor& parallel_for, const std::vector<Slice>& slices);

}  // namespace hvd_sparse
