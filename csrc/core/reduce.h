// Decodes and adds the payloads of all ranks.
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

// The destination of elements [begin, begin + size) of a sum.
struct Slice {
  int64_t begin;
  int64_t size;
  float* out;
};

// Sets the slices to their parts of the sum of scale * decoded payload, in the order of the sources. The slices must
// ascend and not overlap; elements outside all slices are ignored. Each source replaces `format.k` by its own k.
Status ReduceSources(PayloadFormat format, const std::vector<Source>& sources, float scale,
                     const ParallelFor& parallel_for, const std::vector<Slice>& slices);

// The same for the messages of all ranks, whose payloads LocatePayloads finds. outs[i]: the sum of member i,
// members[i].n elements; null: this member is not summed. An error names the first member with an invalid payload; the
// sums of the members before it have then been written.
Status ReduceLocated(const std::vector<PayloadFormat>& members, int64_t ranks, const uint8_t* gathered, int64_t size,
                     float scale, const ParallelFor& parallel_for, const std::vector<float*>& outs);

// Sets out[n] to the sum of scale * decoded payload. The payload of rank r starts at gathered + r * stride. Payloads
// are added in rank order with any number of threads, so the sum is bit-identical on every rank. All payloads are
// validated before `out` is written; an error names the rank.
Status ReducePayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                      const ParallelFor& parallel_for, float* out);

// The same, with slices as the destination.
Status ReducePayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                      const ParallelFor& parallel_for, const std::vector<Slice>& slices);

}  // namespace hvd_sparse
