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

// A sum to compute. The slices must ascend and not overlap; elements outside all slices are ignored. Each source
// replaces `format.k` by its own k.
struct Sum {
  PayloadFormat format;
  std::vector<Source> sources;  // one a rank
  std::vector<Slice> slices;
};

// Sets the slices of each sum to their parts of the sum of scale * decoded payload, in the order of the sources, with
// any number of threads. The payloads of all sums are validated before any slice is written. An error names the rank of
// the first payload that is refused.
Status ReduceSums(const std::vector<Sum>& sums, float scale, const ParallelFor& parallel_for);

// The same for one sum.
Status ReduceSources(const PayloadFormat& format, const std::vector<Source>& sources, float scale,
                     const ParallelFor& parallel_for, const std::vector<Slice>& slices);

// Appends the payloads of all ranks, which have equal formats and start every `stride` bytes.
Status AppendSources(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride,
                     std::vector<Source>* sources);

// Sums the messages of all ranks, whose payloads LocatePayloads finds. outs[i]: the sum of member i, members[i].n
// elements; null: this member is not summed.
Status ReduceLocated(const std::vector<PayloadFormat>& members, int64_t ranks, const uint8_t* gathered, int64_t size,
                     float scale, const ParallelFor& parallel_for, const std::vector<float*>& outs);

// Sets out[n] to the sum of scale * decoded payload. The payload of rank r starts at gathered + r * stride. Payloads
// are added in rank order with any number of threads, so the sum is bit-identical on every rank. All payloads are
// validated before `out` is written; an error names the rank.
Status ReducePayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                      const ParallelFor& parallel_for, float* out);

}  // namespace hvd_sparse
