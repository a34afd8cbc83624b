// torch.ops.hvd_sparse.* for CPU tensors. The ops check tensors, call the core, and raise errors. They do not depend on
// Python, Horovod or MPI.
#include <torch/library.h>

#include <tuple>

#include "../core/finite.h"
#include "../core/low_bit.h"
#include "../core/quantize.h"
#include "../core/reduce.h"
#include "../core/select.h"
#include "../core/threshold.h"
#include "bucket.h"

namespace hvd_sparse {
namespace {

Tensor SelectThresholdOp(const Tensor& values, int64_t k, const std::string& method, double fraction, int64_t seed) {
  TORCH_CHECK_VALUE(method == "exact" || method == "sampled",
                    "hvd_sparse.select_threshold: method must be exact or sampled, got ", method);
  const Tensor flat = values.contiguous();
  const auto kind = method == "exact" ? ThresholdMethod::kExact : ThresholdMethod::kSampled;
  double threshold = 0;
  Raise("select_threshold",
        SelectThreshold(AsArray("select_threshold", flat), {k, kind, fraction, static_cast<uint64_t>(seed)},
                        TorchParallelFor, &threshold));
  return at::scalar_tensor(threshold, at::kDouble);
}

Tensor AccumulateOp(const Tensor& gradient, Tensor residual, std::optional<Tensor> velocity,
                    const std::optional<Tensor>& parameter, double factor, double momentum, bool nesterov,
                    double weight_decay) {
  const Tensor flat = gradient.contiguous();
  const Accumulation a =
      AsAccumulation("accumulate", flat, residual, velocity, parameter, factor, momentum, nesterov, weight_decay);
  return at::scalar_tensor(Accumulate(a.gradient, a.params, TorchParallelFor, a.feedback), at::kBool);
}

std::tuple<Tensor, Tensor, Tensor> SelectTopKOp(const Tensor& values, int64_t k, int64_t seed, double threshold_hint) {
  const Tensor flat = values.contiguous().view(-1);
  Selection selection;
  Raise("select_top_k", SelectTopK(AsArray("select_top_k", flat), {k, threshold_hint, static_cast<uint64_t>(seed)},
                                   TorchParallelFor, &selection));
  const Tensor indices = FromIndices(selection.indices);
  const Tensor info = at::tensor({selection.threshold, static_cast<double>(selection.passed)}, at::kDouble);
  return {indices, flat.index_select(0, indices), info};
}

std::tuple<Tensor, Tensor> FilterThresholdOp(const Tensor& values, double threshold) {
  const Tensor flat = values.contiguous().view(-1);
  std::vector<int64_t> found;
  Raise("filter_threshold", FilterThreshold(AsArray("filter_threshold", flat), threshold, TorchParallelFor, &found));
  const Tensor indices = FromIndices(found);
  return {indices, flat.index_select(0, indices)};
}

Tensor AllFiniteOp(const Tensor& values) {
  const Tensor flat = values.contiguous();
  return at::scalar_tensor(AllFinite(AsArray("all_finite", flat), TorchParallelFor), at::kBool);
}

int64_t PayloadSizeOp(int64_t n, int64_t k, const std::string& coding, const std::string& value_dtype,
                      const std::optional<Tensor>& segments) {
  int64_t size = 0;
  Raise("payload_size", PayloadSize(ParseFormat("payload_size", n, k, coding, value_dtype, segments), &size));
  return size;
}

void PackOp(const Tensor& indices, const Tensor& values, int64_t n, int64_t k, Tensor out, const std::string& coding,
            const std::string& value_dtype, const std::optional<Tensor>& segments) {
  const PayloadFormat format = ParseFormat("pack", n, k, coding, value_dtype, segments);
  CheckTensor("pack", "indices", indices, at::kLong);
  CheckTensor("pack", "values", values, format.dtype == DType::kFloat64 ? at::kDouble : at::kFloat);
  CheckTensor("pack", "out", out, at::kByte);
  TORCH_CHECK_VALUE(indices.numel() == values.numel(), "hvd_sparse.pack: ", indices.numel(), " indices but ",
                    values.numel(), " values");
  int64_t size = 0;
  Raise("pack", PayloadSize(format, &size));
  TORCH_CHECK_VALUE(out.numel() == size, "hvd_sparse.pack: out must have ", size, " bytes, got ", out.numel());
  Raise("pack", Pack(format, indices.const_data_ptr<int64_t>(), values.const_data_ptr(), indices.numel(),
                     out.mutable_data_ptr<uint8_t>()));
}

std::tuple<Tensor, Tensor> UnpackOp(const Tensor& payload, int64_t n, int64_t k, const std::string& coding,
                                    const std::string& value_dtype, const std::optional<Tensor>& segments) {
  const PayloadFormat format = ParseFormat("unpack", n, k, coding, value_dtype, segments);
  CheckTensor("unpack", "payload", payload, at::kByte);
  PayloadView view;
  Raise("unpack", Validate(format, payload.const_data_ptr<uint8_t>(), payload.numel(), &view));
  Tensor indices = at::empty({view.entries}, at::kLong);
  Tensor values = at::empty({view.entries}, format.dtype == DType::kFloat64 ? at::kDouble : at::kFloat);
  Unpack(format, view, indices.mutable_data_ptr<int64_t>(), values.data_ptr());
  return {indices, values};
}

void ReducePayloadsOp(const Tensor& gathered, int64_t offset, int64_t n, int64_t k, Tensor out, double scale,
                      const std::string& coding, const std::string& value_dtype,
                      const std::optional<Tensor>& segments) {
  const char* op = "reduce_payloads";
  const PayloadFormat format = ParseFormat(op, n, k, coding, value_dtype, segments);
  CheckTensor(op, "gathered", gathered, at::kByte);
  CheckTensor(op, "out", out, at::kFloat);
  int64_t size = 0;
  Raise(op, PayloadSize(format, &size));
  TORCH_CHECK_VALUE(gathered.dim() == 2 && offset >= 0 && size <= gathered.size(1) - offset, "hvd_sparse.", op,
                    ": gathered must be [ranks, bytes] with ", size, " bytes at offset ", offset, ", got ",
                    gathered.sizes());
  Raise(op, CheckRanks(gathered.size(0)));
  TORCH_CHECK_VALUE(out.numel() == n, "hvd_sparse.", op, ": out must have ", n, " elements, got ", out.numel());
  Raise(op, ReducePayloads(format, gathered.const_data_ptr<uint8_t>() + offset, gathered.size(0), gathered.size(1),
                           static_cast<float>(scale), TorchParallelFor, out.mutable_data_ptr<float>()));
}

Tensor LocatePayloadsOp(const Tensor& gathered, at::IntArrayRef ns, int64_t ranks, const std::string& coding,
                        const std::string& value_dtype, at::IntArrayRef channels) {
  CheckTensor("locate_payloads", "gathered", gathered, at::kByte);
  TORCH_CHECK_VALUE(!ns.empty(), "hvd_sparse.locate_payloads: there must be an n or more");
  Raise("locate_payloads", CheckRanks(ranks));
  std::vector<PayloadFormat> members = FormatsOf("locate_payloads", ns, channels, coding, value_dtype);
  Tensor found = at::empty({2, ranks, static_cast<int64_t>(ns.size())}, at::kLong);
  auto* offsets = found.mutable_data_ptr<int64_t>();
  Raise("locate_payloads", LocatePayloads(std::move(members), ranks, gathered.const_data_ptr<uint8_t>(),
                                          gathered.numel(), offsets, offsets + found.numel() / 2));
  return found;
}

void ReduceLocatedOp(const Tensor& gathered, const Tensor& places, int64_t n, Tensor out, double scale,
                     const std::string& coding, const std::string& value_dtype, const std::optional<Tensor>& segments) {
  const char* op = "reduce_located";
  CheckTensor(op, "gathered", gathered, at::kByte);
  CheckTensor(op, "places", places, at::kLong);
  CheckTensor(op, "out", out, at::kFloat);
  TORCH_CHECK_VALUE(places.dim() == 2 && places.size(0) == 2, "hvd_sparse.", op, ": places must be [2, ranks], got ",
                    places.sizes());
  TORCH_CHECK_VALUE(out.numel() == n, "hvd_sparse.", op, ": out must have ", n, " elements, got ", out.numel());
  const int64_t ranks = places.size(1);
  Raise(op, CheckRanks(ranks));
  const auto* offsets = places.const_data_ptr<int64_t>();
  PayloadFormat format = ParseFormat(op, n, 1, coding, value_dtype, segments);
  std::vector<Source> sources;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    format.k = offsets[ranks + rank];
    int64_t size = 0;
    Raise(op, PayloadSize(format, &size));
    TORCH_CHECK_VALUE(offsets[rank] >= 0 && size <= gathered.numel() - offsets[rank], "hvd_sparse.", op,
                      ": places leave the ", gathered.numel(), " bytes of gathered");
    sources.push_back({gathered.const_data_ptr<uint8_t>() + offsets[rank], format.k, size});
  }
  Raise(op, ReduceSources(format, sources, static_cast<float>(scale), TorchParallelFor,
                          {{0, n, out.mutable_data_ptr<float>()}}));
}

Tensor QuantizeOp(const Tensor& values, const std::string& value_dtype, const std::string& level,
                  const std::optional<Tensor>& indices, const std::optional<Tensor>& segments) {
  CheckTensor("quantize", "values", values, at::kFloat);
  const Level kind = ParseLevel("quantize", level);
  const Tensor places = indices.value_or(at::empty({0}, at::kLong));
  CheckTensor("quantize", "indices", places, at::kLong);
  const Segments groups = ParseSegments("quantize", segments);
  TORCH_CHECK_VALUE(groups.empty() || places.numel() == values.numel(), "hvd_sparse.quantize: ", places.numel(),
                    " indices but ", values.numel(), " values, and segments");
  const DType dtype = ParseDType("quantize", value_dtype);
  Tensor result = at::empty_like(values);
  const auto* from = values.const_data_ptr<float>();
  auto* to = result.mutable_data_ptr<float>();
  if (IsLowBit(dtype)) {
    Raise("quantize", QuantizeLowBit(from, places.const_data_ptr<int64_t>(), values.numel(), dtype, kind, groups, to));
  } else {
    Quantize(from, values.numel(), dtype, to);
  }
  return result;
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY(hvd_sparse, m) {
  m.def(
      "accumulate(Tensor gradient, Tensor(a!) residual, Tensor(b!)? velocity, Tensor? parameter, float factor, "
      "float momentum, bool nesterov, float weight_decay) -> Tensor");
  m.def("select_threshold(Tensor values, int k, str method, float sample_fraction, int seed) -> Tensor");
  m.def("select_top_k(Tensor values, int k, int seed, float threshold_hint) -> (Tensor, Tensor, Tensor)");
  m.def("filter_threshold(Tensor values, float threshold) -> (Tensor, Tensor)");
  m.def("all_finite(Tensor values) -> Tensor");
  m.def("payload_size(int n, int k, str coding, str value_dtype, Tensor? segments) -> int", &hvd_sparse::PayloadSizeOp);
  m.def(
      "pack(Tensor indices, Tensor values, int n, int k, Tensor(a!) out, str coding, str value_dtype, "
      "Tensor? segments) -> ()");
  m.def("unpack(Tensor payload, int n, int k, str coding, str value_dtype, Tensor? segments) -> (Tensor, Tensor)");
  m.def(
      "reduce_payloads(Tensor gathered, int offset, int n, int k, Tensor(a!) out, float scale, str coding, "
      "str value_dtype, Tensor? segments) -> ()");
  m.def("locate_payloads(Tensor gathered, int[] ns, int ranks, str coding, str value_dtype, int[] channels) -> Tensor");
  m.def(
      "reduce_located(Tensor gathered, Tensor places, int n, Tensor(a!) out, float scale, str coding, "
      "str value_dtype, Tensor? segments) -> ()");
  m.def("quantize(Tensor values, str value_dtype, str level, Tensor? indices, Tensor? segments) -> Tensor");
}

TORCH_LIBRARY_IMPL(hvd_sparse, CPU, m) {
  HVD_SPARSE_IMPL("accumulate", AccumulateOp);
  HVD_SPARSE_IMPL("select_threshold", SelectThresholdOp);
  HVD_SPARSE_IMPL("select_top_k", SelectTopKOp);
  HVD_SPARSE_IMPL("filter_threshold", FilterThresholdOp);
  HVD_SPARSE_IMPL("all_finite", AllFiniteOp);
  HVD_SPARSE_IMPL("pack", PackOp);
  HVD_SPARSE_IMPL("unpack", UnpackOp);
  HVD_SPARSE_IMPL("reduce_payloads", ReducePayloadsOp);
  HVD_SPARSE_IMPL("locate_payloads", LocatePayloadsOp);
  HVD_SPARSE_IMPL("reduce_located", ReduceLocatedOp);
  HVD_SPARSE_IMPL("quantize", QuantizeOp);
}
