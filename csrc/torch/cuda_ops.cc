// torch.ops.hvd_sparse.* for single CUDA tensors. The ops check arguments, launch kernels on the current stream, and
// raise errors. Only filter_threshold, unpack and locate_payloads wait for the device, because the size or the place of
// their results depends on the data.
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <mutex>
#include <tuple>
#include <vector>

#include "../cuda/accumulate.h"
#include "../cuda/filter.h"
#include "../cuda/finite.h"
#include "../cuda/low_bit.h"
#include "../cuda/pack.h"
#include "../cuda/quantize.h"
#include "../cuda/select.h"
#include "../cuda/threshold.h"
#include "cuda_arguments.h"

namespace hvd_sparse {

// hvd_sparse/library.py searches the library for this string.
__attribute__((used)) extern const char kCudaMark[] = "hvd_sparse was built with CUDA";

Tensor DecodeStatusOf(at::Device device) {
  static std::mutex mutex;
  static auto* all = new std::vector<Tensor>;  // never freed: CUDA may shut down before static objects are destroyed
  const std::lock_guard<std::mutex> lock(mutex);
  const auto index = static_cast<size_t>(device.index());
  if (all->size() <= index) all->resize(index + 1);
  Tensor& status = (*all)[index];
  if (status.defined()) return status;
  const c10::InferenceMode off(false);  // an inference tensor could not be reset outside inference mode
  status = at::zeros({2}, at::TensorOptions().device(device).dtype(at::kLong));
  return status;
}

namespace {

Tensor SelectThresholdOp(const Tensor& values, int64_t k, const std::string& method, double fraction, int64_t seed) {
  const CudaCall call("select_threshold", "values", values);
  TORCH_CHECK_VALUE(method == "exact" || method == "sampled",
                    "hvd_sparse.select_threshold: method must be exact or sampled, got ", method);
  const auto kind = method == "exact" ? ThresholdMethod::kExact : ThresholdMethod::kSampled;
  const Tensor flat = values.contiguous();
  const Array array = AsArray(call.op(), flat);
  ThresholdPlan plan;
  call.Check(PlanThreshold(array.size, {k, kind, fraction, static_cast<uint64_t>(seed)}, &plan));
  const Tensor workspace = call.Bytes(select_threshold_workspace_size(array.dtype, plan));
  Tensor threshold = call.Empty({}, at::kDouble);
  call.Run(select_threshold_launch(array, plan, static_cast<uint64_t>(seed), threshold.mutable_data_ptr<double>(),
                                   workspace.data_ptr(), call.stream()));
  return threshold;
}

Tensor AccumulateOp(const Tensor& gradient, Tensor residual, std::optional<Tensor> velocity,
                    const std::optional<Tensor>& parameter, double factor, double momentum, bool nesterov,
                    double weight_decay) {
  const CudaCall call("accumulate", "gradient", gradient);
  const Tensor flat = gradient.contiguous();
  const Accumulation a =
      AsAccumulation(call.op(), flat, residual, velocity, parameter, factor, momentum, nesterov, weight_decay);
  Tensor finite = at::ones({}, at::TensorOptions().device(call.device()).dtype(at::kBool));
  call.Run(accumulate_launch(MakeAccumulateJob(a.gradient, a.params, a.feedback, finite.mutable_data_ptr<bool>()),
                             call.stream()));
  return finite;
}

std::tuple<Tensor, Tensor, Tensor> SelectTopKOp(const Tensor& values, int64_t k, int64_t seed, double threshold_hint) {
  const CudaCall call("select_top_k", "values", values);
  const Tensor flat = values.contiguous();
  const Array array = AsArray(call.op(), flat);
  call.Check(CheckCount(k, array.size));
  int64_t size = 0;
  call.Run(select_top_k_workspace_size(array.dtype, array.size, k, &size));
  const Tensor workspace = call.Bytes(size);
  Tensor indices = call.Empty({k}, at::kLong);
  Tensor selected = call.Empty({k}, flat.scalar_type());
  Tensor info = call.Empty({2}, at::kDouble);
  SelectOutput output{};
  output.indices = indices.mutable_data_ptr<int64_t>();
  output.values = selected.data_ptr();
  output.info = info.mutable_data_ptr<double>();
  call.Run(select_top_k_launch(array, {k, threshold_hint, static_cast<uint64_t>(seed)}, output, workspace.data_ptr(),
                               call.stream()));
  return {indices, selected, info};
}

std::tuple<Tensor, Tensor> FilterThresholdOp(const Tensor& values, double threshold) {
  const CudaCall call("filter_threshold", "values", values);
  TORCH_CHECK_VALUE(threshold >= 0, "hvd_sparse.filter_threshold: threshold must be a number >= 0, got ", threshold);
  const Tensor flat = values.contiguous();
  const Array array = AsArray(call.op(), flat);
  const Tensor found = call.Empty({}, at::kLong);
  call.Run(count_reaching_launch(array, threshold, static_cast<unsigned long long*>(found.data_ptr()), call.stream()));
  const auto count = found.item<int64_t>();  // waits
  Tensor indices = call.Empty({count}, at::kLong);
  Tensor selected = call.Empty({count}, flat.scalar_type());
  if (count == 0) return {indices, selected};
  int64_t size = 0;
  call.Run(filter_threshold_workspace_size(array.size, count, &size));
  const Tensor workspace = call.Bytes(size);
  call.Run(filter_threshold_launch(array, threshold, count, indices.mutable_data_ptr<int64_t>(), selected.data_ptr(),
                                   workspace.data_ptr(), call.stream()));
  return {indices, selected};
}

Tensor AllFiniteOp(const Tensor& values) {
  const CudaCall call("all_finite", "values", values);
  const Tensor flat = values.contiguous();
  Tensor finite = call.Empty({}, at::kBool);
  call.Run(all_finite_launch(AsArray(call.op(), flat), finite.mutable_data_ptr<bool>(), call.stream()));
  return finite;
}

void PackOp(const Tensor& indices, const Tensor& values, int64_t n, int64_t k, Tensor out, const std::string& coding,
            const std::string& value_dtype, const std::optional<Tensor>& segments) {
  const CudaCall call("pack", "out", out);
  const PayloadPlan plan = ParsePlan(call, n, k, coding, value_dtype, segments);
  call.CheckTensorHere("indices", indices, at::kLong);
  call.CheckTensorHere("values", values, plan.dtype == DType::kFloat64 ? at::kDouble : at::kFloat);
  call.CheckTensorHere("out", out, at::kByte);
  const int64_t entries = indices.numel();
  TORCH_CHECK_VALUE(entries == values.numel(), "hvd_sparse.pack: ", entries, " indices but ", values.numel(),
                    " values");
  TORCH_CHECK_VALUE(entries == k || entries == 0, "hvd_sparse.pack: a payload holds k = ", k, " entries or none, got ",
                    entries);
  TORCH_CHECK_VALUE(out.numel() == plan.size, "hvd_sparse.pack: out must have ", plan.size, " bytes, got ",
                    out.numel());
  CheckAligned(call, "out", out.const_data_ptr());
  const Tensor workspace = call.Bytes(pack_workspace_size(plan));
  call.Run(pack_launch(plan, indices.const_data_ptr<int64_t>(), values.const_data_ptr(), entries,
                       out.mutable_data_ptr<uint8_t>(), workspace.data_ptr(), call.stream()));
}

const char* NameOf(int64_t check) {
  switch (static_cast<PayloadCheck>(check)) {
    case PayloadCheck::kMagic: return "magic";
    case PayloadCheck::kVersion: return "version";
    case PayloadCheck::kCoding: return "coding";
    case PayloadCheck::kValueType: return "value dtype";
    case PayloadCheck::kReserved: return "reserved field";
    case PayloadCheck::kElements: return "element count n";
    case PayloadCheck::kEntries: return "entries";
    case PayloadCheck::kChecksum: return "checksum";
    case PayloadCheck::kPositions: break;
  }
  return "positions";
}

std::tuple<Tensor, Tensor> UnpackOp(const Tensor& payload, int64_t n, int64_t k, const std::string& coding,
                                    const std::string& value_dtype, const std::optional<Tensor>& segments) {
  const CudaCall call("unpack", "payload", payload);
  const PayloadPlan plan = ParsePlan(call, n, k, coding, value_dtype, segments);
  call.CheckTensorHere("payload", payload, at::kByte);
  TORCH_CHECK_VALUE(payload.numel() == plan.size, "hvd_sparse.unpack: payload size in bytes is ", payload.numel(),
                    ", expected ", plan.size);
  const Tensor workspace = call.Bytes(unpack_workspace_size(plan));
  const Tensor report = call.Empty({2}, at::kLong);
  Tensor indices = call.Empty({k}, at::kLong);
  Tensor values = call.Empty({k}, plan.dtype == DType::kFloat64 ? at::kDouble : at::kFloat);
  call.Run(unpack_launch(plan, payload.const_data_ptr<uint8_t>(), report.data_ptr<int64_t>(),
                         indices.mutable_data_ptr<int64_t>(), values.data_ptr(), workspace.data_ptr(), call.stream()));
  const Tensor said = report.cpu();  // waits
  const auto failure = said.const_data_ptr<int64_t>()[0];
  TORCH_CHECK_VALUE(failure == kNoFailure, "hvd_sparse.unpack: payload ", NameOf(failure % kChecksEach),
                    " is not what was expected");
  const auto entries = said.const_data_ptr<int64_t>()[1];
  return {indices.narrow(0, 0, entries), values.narrow(0, 0, entries)};
}

void ReducePayloadsOp(const Tensor& gathered, int64_t offset, int64_t n, int64_t k, Tensor out, double scale,
                      const std::string& coding, const std::string& value_dtype,
                      const std::optional<Tensor>& segments) {
  const CudaCall call("reduce_payloads", "gathered", gathered);
  const PayloadPlan plan = ParsePlan(call, n, k, coding, value_dtype, segments);
  call.CheckTensorHere("gathered", gathered, at::kByte);
  call.CheckTensorHere("out", out, at::kFloat);
  TORCH_CHECK_VALUE(gathered.dim() == 2 && offset >= 0 && plan.size <= gathered.size(1) - offset, "hvd_sparse.",
                    call.op(), ": gathered must be [ranks, bytes] with ", plan.size, " bytes at offset ", offset,
                    ", got ", gathered.sizes());
  call.Check(CheckRanks(gathered.size(0)));
  TORCH_CHECK_VALUE(out.numel() == n, "hvd_sparse.", call.op(), ": out must have ", n, " elements, got ", out.numel());
  const Tensor workspace = call.Bytes(reduce_payloads_workspace_size(plan, gathered.size(0)));
  call.Run(reduce_payloads_launch(plan, gathered.const_data_ptr<uint8_t>() + offset, gathered.size(0), gathered.size(1),
                                  static_cast<float>(scale), out.mutable_data_ptr<float>(), call.decode_status(),
                                  workspace.data_ptr(), call.stream()));
}

// Locates payloads in gathered messages. The host needs their offsets and sizes, which depend on each other's headers:
// it copies all messages, and waits.
Tensor LocatePayloadsOp(const Tensor& gathered, at::IntArrayRef ns, int64_t ranks, const std::string& coding,
                        const std::string& value_dtype, at::IntArrayRef channels) {
  static const auto on_host = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("hvd_sparse::locate_payloads", "")
                                  .typed<decltype(LocatePayloadsOp)>();
  return on_host.call(gathered.cpu(), ns, ranks, coding, value_dtype, channels);
}

void ReduceLocatedOp(const Tensor& gathered, const Tensor& places, int64_t n, Tensor out, double scale,
                     const std::string& coding, const std::string& value_dtype, const std::optional<Tensor>& segments) {
  const CudaCall call("reduce_located", "gathered", gathered);
  call.CheckTensorHere("gathered", gathered, at::kByte);
  call.CheckTensorHere("out", out, at::kFloat);
  CheckTensor(call.op(), "places", places, at::kLong);
  TORCH_CHECK_VALUE(places.dim() == 2 && places.size(0) == 2, "hvd_sparse.", call.op(),
                    ": places must be [2, ranks], got ", places.sizes());
  TORCH_CHECK_VALUE(out.numel() == n, "hvd_sparse.", call.op(), ": out must have ", n, " elements, got ", out.numel());
  const int64_t ranks = places.size(1);
  call.Check(CheckRanks(ranks));
  const auto* offsets = places.const_data_ptr<int64_t>();
  LocatedPayloads payloads;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const PayloadPlan plan = ParsePlan(call, n, offsets[ranks + rank], coding, value_dtype, segments);
    TORCH_CHECK_VALUE(offsets[rank] >= 0 && plan.size <= gathered.numel() - offsets[rank], "hvd_sparse.", call.op(),
                      ": places leave the ", gathered.numel(), " bytes of gathered");
    payloads.push_back({plan, gathered.const_data_ptr<uint8_t>() + offsets[rank]});
  }
  const Tensor workspace = call.Bytes(reduce_located_workspace_size(payloads));
  call.Run(reduce_located_launch(payloads, static_cast<float>(scale), out.mutable_data_ptr<float>(),
                                 call.decode_status(), workspace.data_ptr(), call.stream()));
}

// Quantizes k values in place. Without segments, the indices are not read.
void QuantizeLowBitHere(const CudaCall& call, Tensor& values, const Tensor& indices, DType dtype, Level level,
                        const Segments& segments) {
  PayloadPlan plan{};
  plan.n = kMaxElements;
  plan.k = values.numel();
  call.Check(segments.empty() ? Status::Ok() : CheckSegments(segments, kMaxElements));
  SetGroups(dtype, segments, &plan);
  int64_t size = 0;
  call.Run(quantize_low_bit_workspace_size(plan, &size));
  const Tensor workspace = call.Bytes(size);
  call.Run(quantize_low_bit_launch(plan, level, indices.const_data_ptr<int64_t>(), values.mutable_data_ptr<float>(),
                                   workspace.data_ptr(), call.stream()));
}

Tensor QuantizeOp(const Tensor& values, const std::string& value_dtype, const std::string& level,
                  const std::optional<Tensor>& indices, const std::optional<Tensor>& segments) {
  const CudaCall call("quantize", "values", values);
  call.CheckTensorHere("values", values, at::kFloat);
  const Level kind = ParseLevel(call.op(), level);
  const Tensor places = indices.value_or(call.Empty({0}, at::kLong));
  call.CheckTensorHere("indices", places, at::kLong);
  const Segments groups = ParseSegments(call.op(), segments);
  TORCH_CHECK_VALUE(groups.empty() || places.numel() == values.numel(), "hvd_sparse.quantize: ", places.numel(),
                    " indices but ", values.numel(), " values, and segments");
  const DType dtype = ParseDType(call.op(), value_dtype);
  if (IsLowBit(dtype)) {
    Tensor result = values.clone();
    QuantizeLowBitHere(call, result, places, dtype, kind, groups);
    return result;
  }
  Tensor result = at::empty_like(values);
  call.Run(quantize_launch(values.const_data_ptr<float>(), values.numel(), dtype, result.mutable_data_ptr<float>(),
                           call.stream()));
  return result;
}

Tensor TakeDecodeStatusOp(const Tensor& like) {
  const CudaCall call("take_decode_status", "like", like);
  const Tensor status = DecodeStatusOf(call.device());
  Tensor taken = status.clone();
  status.zero_();
  return taken;
}

void Refuse(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.operator_name(), " takes no CUDA tensors in this version: pass CPU copies");
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_FRAGMENT(hvd_sparse, m) { m.def("take_decode_status(Tensor like) -> Tensor"); }

TORCH_LIBRARY_IMPL(hvd_sparse, CUDA, m) {
  m.impl("accumulate", &hvd_sparse::AccumulateOp);
  m.impl("select_threshold", &hvd_sparse::SelectThresholdOp);
  m.impl("select_top_k", &hvd_sparse::SelectTopKOp);
  m.impl("filter_threshold", &hvd_sparse::FilterThresholdOp);
  m.impl("all_finite", &hvd_sparse::AllFiniteOp);
  m.impl("pack", &hvd_sparse::PackOp);
  m.impl("unpack", &hvd_sparse::UnpackOp);
  m.impl("reduce_payloads", &hvd_sparse::ReducePayloadsOp);
  m.impl("locate_payloads", &hvd_sparse::LocatePayloadsOp);
  m.impl("reduce_located", &hvd_sparse::ReduceLocatedOp);
  m.impl("quantize", &hvd_sparse::QuantizeOp);
  m.impl("take_decode_status", &hvd_sparse::TakeDecodeStatusOp);
  for (const char* name : {"filter_bucket", "reduce_located_bucket"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&hvd_sparse::Refuse>());
  }
}
