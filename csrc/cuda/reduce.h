// Decodes and adds the payloads of all ranks on a device; see core/reduce.h. Payloads are added in rank order, so the
// sums are bit-identical to the core's.
//
// The host does not wait, so a damaged payload cannot raise an error. Instead, the whole output becomes NaN, which a
// loss scaler or a look at the loss will detect, and `status` records the failure for later.
#pragma once

#include "decode.h"

namespace hvd_sparse {

// Two int64 on the device: the number of selections with a damaged payload, and the first failure of the first such
// selection (of any, if several are in one launch) as rank * 256 + check.
struct DecodeStatus {
  unsigned long long refused;
  long long first;
};

// A selection whose payloads are summed, or removed from the error feedback.
struct ReduceSelection {
  PayloadPlan plan;
  const uint8_t* first;               // the first rank's payload
  std::vector<FeedbackSlice> slices;  // the outputs of the sum, as residuals without velocities; or the error feedback
};
using ReduceSelections = std::vector<ReduceSelection>;

// Returns a selection whose sums of all n elements are `out`.
inline ReduceSelections WholeSelection(const PayloadPlan& plan, const uint8_t* first, float* out) {
  return {{plan, first, {{0, plan.n, {out, nullptr}}}}};
}

int64_t reduce_workspace_size(const ReduceSelections& selections, int64_t ranks);

// Sums payloads and sets the residuals of the slices. A selection's payload of rank r is r * stride bytes after the
// first one.
cudaError_t reduce_launch(const ReduceSelections& selections, int64_t ranks, int64_t stride, float scale,
                          DecodeStatus* status, void* workspace, cudaStream_t stream);

// Removes the values of this rank's own payloads from the error feedback: the residual of a sent element becomes zero
// for float32 values, and the rounding error for other types; its velocity becomes zero, unless it is null. Then adds
// `retained` times the sent values to the residual. A damaged payload changes nothing.
cudaError_t clear_launch(const ReduceSelections& selections, float retained, DecodeStatus* status, void* workspace,
                         cudaStream_t stream);

int64_t reduce_payloads_workspace_size(const PayloadPlan& plan, int64_t ranks);

// Sums payloads and sets out[n]. The payload of rank r starts at gathered + r * stride.
cudaError_t reduce_payloads_launch(const PayloadPlan& plan, const uint8_t* gathered, int64_t ranks, int64_t stride,
                                   float scale, float* out, DecodeStatus* status, void* workspace, cudaStream_t stream);

// One rank's payload, for payloads of different sizes.
struct LocatedPayload {
  PayloadPlan plan;  // n and value type are the same for all ranks
  const uint8_t* payload;
};
using LocatedPayloads = std::vector<LocatedPayload>;

int64_t reduce_located_workspace_size(const LocatedPayloads& payloads);

// Sums located payloads in rank order and sets out[n]. Without payloads it does nothing.
cudaError_t reduce_located_launch(const LocatedPayloads& payloads, float scale, float* out, DecodeStatus* status,
                                  void* workspace, cudaStream_t stream);

int64_t unpack_workspace_size(const PayloadPlan& plan);

// Validates and decodes one payload. report, on the device: the first failure or kNoFailure, and the number of entries.
// Unless a check failed, it writes indices and values of this number; values are float64 for this type, else float32.
cudaError_t unpack_launch(const PayloadPlan& plan, const uint8_t* payload, int64_t* report, int64_t* indices,
                          void* values, void* workspace, cudaStream_t stream);

}  // namespace hvd_sparse
