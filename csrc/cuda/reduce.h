// Decode-and-add of the payloads of all ranks, on a device; see core/reduce.h. Sums are in rank order, the same bits as
// the core's.
//
// A payload that fails a check is not reported to the host, which does not wait: the whole output becomes NaN, which a
// loss scaler or any look at the loss will meet, and `status` says what happened to whoever reads it later.
#pragma once

#include "decode.h"

namespace hvd_sparse {

// int64, on the device: how many selections met a payload that failed, and what failed first in the one that said so
// first (of several in one launch, any), as rank * 256 + check.
struct DecodeStatus {
  unsigned long long refused;
  long long first;
};

// Selections that are summed, or taken out of a memory, together.
struct ReduceSelection {
  PayloadPlan plan;
  const uint8_t* first;             // the first rank's payload
  std::vector<MemorySlice> slices;  // where their sums go, as residuals without velocities; or the memory
};
using ReduceSelections = std::vector<ReduceSelection>;

int64_t reduce_workspace_size(const ReduceSelections& selections, int64_t ranks);

// Payload r of a selection lies r * stride bytes behind its first. Sets the residuals of the slices.
cudaError_t reduce_launch(const ReduceSelections& selections, int64_t ranks, int64_t stride, float scale,
                          DecodeStatus* status, void* workspace, cudaStream_t stream);

// Takes what payloads of the rank's own say out of the memory, as below; then `retained` times what was sent is added.
cudaError_t clear_launch(const ReduceSelections& selections, float retained, DecodeStatus* status, void* workspace,
                         cudaStream_t stream);

int64_t reduce_payloads_workspace_size(const PayloadPlan& plan, int64_t ranks);

// Payload r starts at gathered + r * stride, for r in [0, ranks). Sets out[n].
cudaError_t reduce_payloads_launch(const PayloadPlan& plan, const uint8_t* gathered, int64_t ranks, int64_t stride,
                                   float scale, float* out, DecodeStatus* status, void* workspace, cudaStream_t stream);

// A rank's payload, where their sizes differ.
struct LocatedPayload {
  PayloadPlan plan;  // of the same n and values
  const uint8_t* payload;
};
using LocatedPayloads = std::vector<LocatedPayload>;

int64_t reduce_located_workspace_size(const LocatedPayloads& payloads);

// The same of payloads in rank order.
cudaError_t reduce_located_launch(const LocatedPayloads& payloads, float scale, float* out, DecodeStatus* status,
                                  void* workspace, cudaStream_t stream);

int64_t unpack_workspace_size(const PayloadPlan& plan);

// Takes what a payload of the rank's own says out of the residual: nothing is left of float32, of others what rounding
// kept; the velocity there becomes zero, unless it is null. A payload that fails a check changes neither.
cudaError_t clear_launch(const PayloadPlan& plan, const uint8_t* payload, float* residual, float* velocity,
                         DecodeStatus* status, void* workspace, cudaStream_t stream);

// Checks and decodes one payload. report, on the device: what failed, as kNoFailure says, and how many entries; as many
// indices, and values as float32 (float64 for that type), are written, unless a check failed.
cudaError_t unpack_launch(const PayloadPlan& plan, const uint8_t* payload, int64_t* report, int64_t* indices,
                          void* values, void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
