// The core as plain C functions on pointers, for `hvd_sparse.native`, which needs no framework. The caller checks the
// sizes and types of arrays, and the coding, value type and level, which have the numbers of the wire format.
#include <algorithm>
#include <vector>

#include "../core/accumulate.h"
#include "../core/low_bit.h"
#include "../core/quantize.h"
#include "../core/select.h"
#include "report.h"

using hvd_sparse::DType;
using hvd_sparse::FormatOf;
using hvd_sparse::Guarded;
using hvd_sparse::SerialFor;

// `hvd_sparse.native` defines a structure with the same layout; see HvdSparseForm.
struct HvdSparseRule {
  float factor;
  float momentum;
  float weight_decay;
  int32_t nesterov;
};
static_assert(sizeof(HvdSparseRule) == 16 && offsetof(HvdSparseRule, nesterov) == 12);

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

}  // namespace

// gradient, residual, and unless null velocity and parameter: n elements. finite: whether the gradient was finite.
HVD_SPARSE_API int hvd_sparse_accumulate(const float* gradient, int64_t n, const HvdSparseRule* rule,
                                         const float* parameter, float* residual, float* velocity, int32_t* finite,
                                         char* message) {
  return Guarded(message, [&] {
    *finite = hvd_sparse::Accumulate({gradient, n, DType::kFloat32}, ParamsOf(*rule, parameter, velocity), SerialFor,
                                     {residual, velocity});
    return hvd_sparse::Status::Ok();
  });
}

// The same, followed by a selection. indices[k]; info[2]: the threshold, and the number of elements that reached the
// hint.
HVD_SPARSE_API int hvd_sparse_accumulate_top_k(const float* gradient, int64_t n, const HvdSparseRule* rule,
                                               const float* parameter, float* residual, float* velocity, int64_t k,
                                               uint64_t seed, double hint, int64_t* indices, double* info,
                                               int32_t* finite, char* message) {
  return Guarded(message, [&] {
    hvd_sparse::Selection selection;
    bool is_finite = true;
    const hvd_sparse::Status status =
        hvd_sparse::AccumulateTopK({gradient, n, DType::kFloat32}, ParamsOf(*rule, parameter, velocity),
                                   {k, hint, seed}, SerialFor, {residual, velocity}, &is_finite, &selection);
    *finite = is_finite;
    return hvd_sparse::CopySelection(status, selection, indices, info);
  });
}

HVD_SPARSE_API int hvd_sparse_select_top_k(const float* values, int64_t n, int64_t k, uint64_t seed, double hint,
                                           int64_t* indices, double* info, char* message) {
  return Guarded(message, [&] {
    hvd_sparse::Selection selection;
    const hvd_sparse::Status status =
        hvd_sparse::SelectTopK({values, n, DType::kFloat32}, {k, hint, seed}, SerialFor, &selection);
    return hvd_sparse::CopySelection(status, selection, indices, info);
  });
}

// indices: room for n, of which `count` are set: the elements that reach the threshold.
HVD_SPARSE_API int hvd_sparse_filter_threshold(const float* values, int64_t n, double threshold, int64_t* indices,
                                               int64_t* count, char* message) {
  return Guarded(message, [&] {
    std::vector<int64_t> found;
    hvd_sparse::Status status = hvd_sparse::FilterThreshold({values, n, DType::kFloat32}, threshold, SerialFor, &found);
    if (!status.ok()) return status;
    std::copy(found.begin(), found.end(), indices);
    *count = static_cast<int64_t>(found.size());
    return status;
  });
}

// Sets result[form->k] to the values at the indices as the receiver will decode them.
HVD_SPARSE_API int hvd_sparse_quantize(const HvdSparseForm* form, int32_t level, const float* values,
                                       const int64_t* indices, float* result, char* message) {
  return Guarded(message, [&] {
    const hvd_sparse::PayloadFormat format = FormatOf(*form);
    if (!hvd_sparse::IsLowBit(format.dtype)) {
      hvd_sparse::Quantize(values, format.k, format.dtype, result);
      return hvd_sparse::Status::Ok();
    }
    const auto kind = static_cast<hvd_sparse::Level>(level);
    return hvd_sparse::QuantizeLowBit(values, indices, format.k, format.dtype, kind, format.segments, result);
  });
}

// payload: `hvd_sparse.wire.payload_size` bytes.
HVD_SPARSE_API int hvd_sparse_pack(const HvdSparseForm* form, const int64_t* indices, const void* values,
                                   int64_t entries, uint8_t* payload, char* message) {
  return Guarded(message, [&] { return hvd_sparse::Pack(FormatOf(*form), indices, values, entries, payload); });
}

// indices and values: room for form->k; entries: the number of entries in the payload.
HVD_SPARSE_API int hvd_sparse_unpack(const HvdSparseForm* form, const uint8_t* payload, int64_t size, int64_t* indices,
                                     void* values, int64_t* entries, char* message) {
  return Guarded(message,
                 [&] { return hvd_sparse::UnpackChecked(FormatOf(*form), payload, size, indices, values, entries); });
}

// Unpacks `count` consecutive payloads of float32 values, with n, k and coding of each. indices and values: room for
// the sum of all ks; indices count from the first element of the first payload. entries: the number of entries.
HVD_SPARSE_API int hvd_sparse_unpack_payloads(const uint8_t* payloads, int64_t size, const int64_t* ns,
                                              const int64_t* ks, const int32_t* codings, int64_t count,
                                              int64_t* indices, float* values, int64_t* entries, char* message) {
  return Guarded(message, [&] {
    int64_t at = 0;
    int64_t begin = 0;
    *entries = 0;
    for (int64_t p = 0; p < count; ++p) {
      const hvd_sparse::PayloadFormat format{
          ns[p], ks[p], static_cast<hvd_sparse::Coding>(codings[p]), DType::kFloat32, {}};
      int64_t own = 0;
      int64_t found = 0;
      hvd_sparse::Status status = hvd_sparse::PayloadSize(format, &own);
      if (status.ok()) {
        status = hvd_sparse::UnpackChecked(format, payloads + at, std::min(own, size - at), indices + *entries,
                                           values + *entries, &found);
      }
      if (!status.ok()) return status;
      for (int64_t j = 0; j < found; ++j) indices[*entries + j] += begin;
      *entries += found;
      at += own;
      begin += ns[p];
    }
    return hvd_sparse::Status::Ok();
  });
}
