// A bucket of tensors in one call: what costs little for each of many small tensors costs more to call.
#include <torch/library.h>

#include <initializer_list>

#include "../core/low_bit.h"
#include "../core/quantize.h"
#include "../core/reduce.h"
#include "../core/run_length.h"
#include "../core/select.h"
#include "arguments.h"

namespace hvd_sparse {
namespace {

using at::TensorList;
using OptionalTensors = c10::List<std::optional<Tensor>>;

void CheckMembers(const char* op, size_t members, std::initializer_list<size_t> sizes) {
  for (const size_t size : sizes) {
    TORCH_CHECK_VALUE(size == members, "hvd_sparse.", op, ": every list must be ", members, ", one a member; got ",
                      size);
  }
}

// The member's part of a message.
uint8_t* Part(const char* op, const PayloadFormat& format, const Tensor& message, int64_t offset) {
  int64_t size = 0;
  Raise(op, PayloadSize(format, &size));
  TORCH_CHECK_VALUE(offset >= 0 && size <= message.numel() - offset, "hvd_sparse.", op, ": a payload of ", size,
                    " bytes at offset ", offset, " leaves the message of ", message.numel());
  return static_cast<uint8_t*>(message.data_ptr()) + offset;
}

// What was selected of a member, as it travels.
void PackSelected(const char* op, const PayloadFormat& format, Centre centre, const float* residual,
                  const std::vector<int64_t>& indices, uint8_t* out) {
  std::vector<float> values;
  values.reserve(indices.size());
  for (const int64_t index : indices) values.push_back(residual[index]);
  if (IsLowBit(format.dtype)) {
    Raise(op, QuantizeLowBit(values.data(), indices.data(), format.k, format.dtype, centre, format.segments,
                             values.data()));
  }
  Raise(op, Pack(format, indices.data(), values.data(), format.k, out));
}

// Writes the member's payload, and threshold, how many elements reached the hint, whether the gradient was finite.
void AccumulateMember(const char* op, const Accumulation& a, const SelectParams& params, const PayloadFormat& format,
                      Centre centre, uint8_t* part, double* info) {
  Selection selection;
  bool finite = true;
  Raise(op, AccumulateTopK(a.gradient, a.params, params, TorchParallelFor, a.memory, &finite, &selection));
  PackSelected(op, format, centre, a.memory.residual, selection.indices, part);
  info[0] = selection.threshold;
  info[1] = static_cast<double>(selection.passed);
  info[2] = finite ? 1.0 : 0.0;
}

std::optional<Tensor> MemberOf(TensorList list, size_t i) {
  return list.empty() ? std::optional<Tensor>() : std::optional<Tensor>(list[i]);
}

Tensor AccumulateBucketOp(TensorList gradients, TensorList residuals, TensorList velocities, TensorList parameters,
                          at::ArrayRef<double> factors, double momentum, bool nesterov, double weight_decay,
                          at::IntArrayRef ks, int64_t seed, at::ArrayRef<double> hints, Tensor out,
                          at::IntArrayRef offsets, const std::string& coding, const std::string& value_dtype,
                          const std::string& centre, const OptionalTensors& segments) {
  const char* op = "accumulate_bucket";
  const size_t members = gradients.size();
  CheckMembers(op, members,
               {residuals.size(), factors.size(), ks.size(), hints.size(), offsets.size(), segments.size(),
                velocities.empty() ? members : velocities.size(), parameters.empty() ? members : parameters.size()});
  CheckTensor(op, "out", out, at::kByte);
  const Centre kind = ParseCentre(op, centre);
  Tensor info = at::empty({static_cast<int64_t>(members), 3}, at::kDouble);
  for (size_t i = 0; i < members; ++i) {
    const Tensor flat = gradients[i].contiguous();
    Tensor residual = residuals[i];
    std::optional<Tensor> velocity = MemberOf(velocities, i);
    const std::optional<Tensor> parameter = MemberOf(parameters, i);
    const Accumulation a =
        AsAccumulation(op, flat, residual, velocity, parameter, factors[i], momentum, nesterov, weight_decay);
    const PayloadFormat format = ParseFormat(op, flat.numel(), ks[i], coding, value_dtype, segments.get(i));
    AccumulateMember(op, a, {ks[i], hints[i], static_cast<uint64_t>(seed)}, format, kind,
                     Part(op, format, out, offsets[i]), info.mutable_data_ptr<double>() + 3 * i);
  }
  return info;
}

// Takes what a payload of the rank's own says out of a memory: nothing is left of float32, of others what rounding
// kept.
void ClearMember(const char* op, const PayloadFormat& format, const uint8_t* part, float* residual, float* velocity) {
  int64_t size = 0;
  PayloadView view;
  Raise(op, PayloadSize(format, &size));
  Raise(op, Validate(format, part, size, &view));
  std::vector<int64_t> indices(static_cast<size_t>(view.entries));
  DecodeRunLength(view.positions.counts.data(), view.positions.runs.data(), format.n, indices.data());
  int64_t j = 0;
  for (const int64_t index : indices) {
    const float sent = ValueAt(view, format.dtype, j++);
    residual[index] = format.dtype == DType::kFloat32 ? 0.0f : residual[index] - sent;
    if (velocity != nullptr) velocity[index] = 0.0f;
  }
}

void ClearBucketOp(const Tensor& message, at::IntArrayRef offsets, at::IntArrayRef ks, TensorList residuals,
                   TensorList velocities, const std::string& coding, const std::string& value_dtype,
                   const OptionalTensors& segments) {
  const char* op = "clear_bucket";
  const size_t members = residuals.size();
  CheckMembers(op, members,
               {offsets.size(), ks.size(), segments.size(), velocities.empty() ? members : velocities.size()});
  CheckTensor(op, "message", message, at::kByte);
  for (size_t i = 0; i < members; ++i) {
    Tensor residual = residuals[i];
    std::optional<Tensor> velocity = MemberOf(velocities, i);
    const PayloadFormat format = ParseFormat(op, residual.numel(), ks[i], coding, value_dtype, segments.get(i));
    ClearMember(op, format, Part(op, format, message, offsets[i]),
                MemoryData(op, "residual", residual, residual.numel()),
                velocity ? MemoryData(op, "velocity", *velocity, residual.numel()) : nullptr);
  }
}

void ReduceBucketOp(const Tensor& gathered, at::IntArrayRef offsets, at::IntArrayRef ks, TensorList outs, double scale,
                    const std::string& coding, const std::string& value_dtype, const OptionalTensors& segments) {
  const char* op = "reduce_bucket";
  const size_t members = outs.size();
  CheckMembers(op, members, {offsets.size(), ks.size(), segments.size()});
  CheckTensor(op, "gathered", gathered, at::kByte);
  TORCH_CHECK_VALUE(gathered.dim() == 2 && gathered.size(0) > 0, "hvd_sparse.", op,
                    ": gathered must be [ranks, bytes], got ", gathered.sizes());
  for (size_t i = 0; i < members; ++i) {
    Tensor out = outs[i];
    CheckTensor(op, "out", out, at::kFloat);
    const PayloadFormat format = ParseFormat(op, out.numel(), ks[i], coding, value_dtype, segments.get(i));
    const uint8_t* part = Part(op, format, gathered[0], offsets[i]);
    Raise(op, ReducePayloads(format, part, gathered.size(0), gathered.size(1), static_cast<float>(scale),
                             TorchParallelFor, out.mutable_data_ptr<float>()));
  }
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_FRAGMENT(hvd_sparse, m) {
  m.def(
      "accumulate_bucket(Tensor[] gradients, Tensor(a!)[] residuals, Tensor(b!)[] velocities, Tensor[] parameters, "
      "float[] factors, float momentum, bool nesterov, float weight_decay, int[] ks, int seed, float[] hints, "
      "Tensor(c!) out, int[] offsets, str coding, str value_dtype, str centre, Tensor?[] segments) -> Tensor");
  m.def(
      "clear_bucket(Tensor message, int[] offsets, int[] ks, Tensor(a!)[] residuals, Tensor(b!)[] velocities, "
      "str coding, str value_dtype, Tensor?[] segments) -> ()");
  m.def(
      "reduce_bucket(Tensor gathered, int[] offsets, int[] ks, Tensor(a!)[] outs, float scale, str coding, "
      "str value_dtype, Tensor?[] segments) -> ()");
}

TORCH_LIBRARY_IMPL(hvd_sparse, CPU, m) {
  m.impl("accumulate_bucket", &hvd_sparse::AccumulateBucketOp);
  m.impl("clear_bucket", &hvd_sparse::ClearBucketOp);
  m.impl("reduce_bucket", &hvd_sparse::ReduceBucketOp);
}
