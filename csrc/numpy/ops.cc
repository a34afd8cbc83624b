// The core as plain C functions on pointers, for `hvd_sparse.native`, which needs no framework: call, report. Sizes and
// types of arrays are the caller's business; coding, value type and centre are numbers of the wire, which it has
// checked. Each returns 0, 1 for a bad argument or 2 for a damaged payload, and then writes why into
// message[kMessageBytes].
#include <algorithm>
#include <cstring>

#include "../core/accumulate.h"
#include "../core/low_bit.h"
#include "../core/payload.h"
#include "../core/quantize.h"
#include "../core/select.h"

#define HVD_SPARSE_API extern "C" __attribute__((visibility("default")))

namespace hvd_sparse {
namespace {

constexpr size_t kMessageBytes = 512;

int Report(const Status& status, char* message) {
  if (status.ok()) return 0;
  const size_t length = std::min(status.message.size(), kMessageBytes - 1);
  std::memcpy(message, status.message.data(), length);
  message[length] = 0;
  return status.kind == StatusKind::kCorruptPayload ? 2 : 1;
}

}  // namespace
}  // namespace hvd_sparse

using hvd_sparse::DType;
using hvd_sparse::Report;
using hvd_sparse::SerialFor;

// What `hvd_sparse.native` lays out alike.
struct HvdSparseRule {
  float factor;
  float momentum;
  float weight_decay;
  int32_t nesterov;
};

struct HvdSparseForm {
  int64_t n;
  int64_t k;
  int32_t coding;
  int32_t dtype;
  const int64_t* segments;  // pairs of begin and columns
  int64_t segment_count;
};

namespace {

hvd_sparse::AccumulateParams ParamsOf(const HvdSparseRule& rule, const float* parameter, const float* velocity) {
  hvd_sparse::AccumulateParams params;
  params.rule = !velocity       ? hvd_sparse::AccumulateRule::kResidual
                : rule.nesterov ? hvd_sparse::AccumulateRule::kNesterov
                                : hvd_sparse::AccumulateRule::kMomentum;
  params.factor = rule.factor;
  params.momentum = rule.momentum;
  params.weight_decay = parameter ? rule.weight_decay : 0.0f;
  params.parameter = parameter;
  return params;
}

hvd_sparse::PayloadFormat FormatOf(const HvdSparseForm& form) {
  hvd_sparse::PayloadFormat format{
      form.n, form.k, static_cast<hvd_sparse::Coding>(form.coding), static_cast<DType>(form.dtype), {}};
  for (int64_t s = 0; s < form.segment_count; ++s) {
    format.segments.push_back({form.segments[2 * s], form.segments[2 * s + 1]});
  }
  return format;
}

int Select(const hvd_sparse::Status& status, const hvd_sparse::Selection& selection, int64_t* indices, double* info,
           char* message) {
  if (!status.ok()) return Report(status, message);
  std::copy(selection.indices.begin(), selection.indices.end(), indices);
  info[0] = selection.threshold;
  info[1] = static_cast<double>(selection.passed);
  return 0;
}

}  // namespace

// gradient, residual, and where not null velocity and parameter: n elements. finite: whether the gradient was.
HVD_SPARSE_API int hvd_sparse_accumulate(const float* gradient, int64_t n, const HvdSparseRule* rule,
                                         const float* parameter, float* residual, float* velocity, int32_t* finite,
                                         char* /*message*/) {
  *finite = hvd_sparse::Accumulate({gradient, n, DType::kFloat32}, ParamsOf(*rule, parameter, velocity), SerialFor,
                                   {residual, velocity});
  return 0;
}

// The same, then a selection: indices[k]; info[2]: threshold, and how many reached the hint.
HVD_SPARSE_API int hvd_sparse_accumulate_top_k(const float* gradient, int64_t n, const HvdSparseRule* rule,
                                               const float* parameter, float* residual, float* velocity, int64_t k,
                                               uint64_t seed, double hint, int64_t* indices, double* info,
                                               int32_t* finite, char* message) {
  hvd_sparse::Selection selection;
  bool is_finite = true;
  const hvd_sparse::Status status =
      hvd_sparse::AccumulateTopK({gradient, n, DType::kFloat32}, ParamsOf(*rule, parameter, velocity), {k, hint, seed},
                                 SerialFor, {residual, velocity}, &is_finite, &selection);
  *finite = is_finite;
  return Select(status, selection, indices, info, message);
}

HVD_SPARSE_API int hvd_sparse_select_top_k(const float* values, int64_t n, int64_t k, uint64_t seed, double hint,
                                           int64_t* indices, double* info, char* message) {
  hvd_sparse::Selection selection;
  const hvd_sparse::Status status =
      hvd_sparse::SelectTopK({values, n, DType::kFloat32}, {k, hint, seed}, SerialFor, &selection);
  return Select(status, selection, indices, info, message);
}

// form->k values at indices, as they will be decoded: result[k].
HVD_SPARSE_API int hvd_sparse_quantize(const HvdSparseForm* form, int32_t centre, const float* values,
                                       const int64_t* indices, float* result, char* message) {
  const hvd_sparse::PayloadFormat format = FormatOf(*form);
  if (!hvd_sparse::IsLowBit(format.dtype)) {
    hvd_sparse::Quantize(values, format.k, format.dtype, result);
    return 0;
  }
  const auto kind = static_cast<hvd_sparse::Centre>(centre);
  return Report(hvd_sparse::QuantizeLowBit(values, indices, format.k, format.dtype, kind, format.segments, result),
                message);
}

// payload: as many bytes as `hvd_sparse.wire.payload_size` says.
HVD_SPARSE_API int hvd_sparse_pack(const HvdSparseForm* form, const int64_t* indices, const void* values,
                                   int64_t entries, uint8_t* payload, char* message) {
  return Report(hvd_sparse::Pack(FormatOf(*form), indices, values, entries, payload), message);
}

// indices and values: room for form->k; entries: how many there are.
HVD_SPARSE_API int hvd_sparse_unpack(const HvdSparseForm* form, const uint8_t* payload, int64_t size, int64_t* indices,
                                     void* values, int64_t* entries, char* message) {
  const hvd_sparse::PayloadFormat format = FormatOf(*form);
  hvd_sparse::PayloadView view;
  const hvd_sparse::Status status = hvd_sparse::Validate(format, payload, size, &view);
  if (!status.ok()) return Report(status, message);
  hvd_sparse::Unpack(format, view, indices, values);
  *entries = view.entries;
  return 0;
}
