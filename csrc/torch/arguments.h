// Code shared by all PyTorch ops: it checks arguments, passes them to the core, and raises errors. Wrong arguments and
// damaged payloads raise ValueError (TORCH_CHECK_VALUE).
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../core/accumulate.h"
#include "../core/denormals.h"
#include "../core/names.h"
#include "../core/payload.h"

namespace hvd_sparse {

using at::Tensor;

// Returns indices as int64[n].
inline Tensor FromIndices(const std::vector<int64_t>& indices) {
  Tensor result = at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
  std::copy(indices.begin(), indices.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

// Each of PyTorch's threads has its own setting of torch.set_flush_denormal.
inline void TorchParallelFor(int64_t begin, int64_t end, int64_t grain, const RangeFunction& body) {
  at::parallel_for(begin, end, grain, [&body](int64_t first, int64_t last) {
    const KeepDenormals keep;
    body(first, last);
  });
}

// An op whose calling thread keeps denormals, too.
template <auto op>
struct WithDenormals;

template <typename Result, typename... Arguments, Result (*op)(Arguments...)>
struct WithDenormals<op> {
  static Result Call(Arguments... arguments) {
    const KeepDenormals keep;
    return op(std::forward<Arguments>(arguments)...);
  }
};

// In TORCH_LIBRARY_IMPL(hvd_sparse, CPU, m): registers a function as the op of this name.
#define HVD_SPARSE_IMPL(name, function) m.impl(name, &::hvd_sparse::WithDenormals<&::hvd_sparse::function>::Call)

inline void Raise(const char* op, const Status& status) {
  TORCH_CHECK_VALUE(status.ok(), "hvd_sparse.", op, ": ", status.message);
}

inline void CheckDevice(const char* op, const char* name, const Tensor& tensor, at::Device device) {
  TORCH_CHECK_VALUE(!device.is_cpu() || tensor.device().is_cpu(), "hvd_sparse.", op, ": ", name,
                    " must be a CPU tensor, got ", tensor.device());
  TORCH_CHECK_VALUE((device.is_cpu() || tensor.device() == device), "hvd_sparse.", op, ": ", name, " must be on ",
                    device, ", as the others are; got ", tensor.device());
}

inline void CheckTensor(const char* op, const char* name, const Tensor& tensor, at::ScalarType dtype,
                        at::Device device = at::kCPU) {
  CheckDevice(op, name, tensor, device);
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, "hvd_sparse.", op, ": ", name, " must be ", dtype, ", got ",
                    tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "hvd_sparse.", op, ": ", name, " must be contiguous");
}

// Returns the data of a tensor. `contiguous` must outlive the result.
inline Array AsArray(const char* op, const Tensor& contiguous) {
  DType dtype = DType::kFloat32;
  switch (contiguous.scalar_type()) {
    case at::kFloat: break;
    case at::kDouble: dtype = DType::kFloat64; break;
    case at::kHalf: dtype = DType::kFloat16; break;
    case at::kBFloat16: dtype = DType::kBFloat16; break;
    default:
      TORCH_CHECK_VALUE(false, "hvd_sparse.", op, ": values must be float32, float64, float16 or bfloat16, got ",
                        contiguous.scalar_type());
  }
  return {contiguous.const_data_ptr(), contiguous.numel(), dtype};
}

template <typename T, size_t count>
T Parse(const char* op, const char* argument, const Named<T> (&all)[count], const std::string& name) {
  T value{};
  Raise(op, ParseName(argument, all, name, &value));
  return value;
}

inline DType ParseDType(const char* op, const std::string& name) { return Parse(op, "value_dtype", kDTypeNames, name); }

inline Level ParseLevel(const char* op, const std::string& name) { return Parse(op, "level", kLevelNames, name); }

inline Coding ParseCoding(const char* op, const std::string& name) { return Parse(op, "coding", kCodingNames, name); }

inline Segments ParseSegments(const char* op, const std::optional<Tensor>& segments) {
  if (!segments) return {};
  CheckTensor(op, "segments", *segments, at::kLong);
  TORCH_CHECK_VALUE(segments->dim() == 2 && segments->size(1) == 2, "hvd_sparse.", op,
                    ": segments must be [segments, 2], got ", segments->sizes());
  Segments result;
  const auto* numbers = segments->const_data_ptr<int64_t>();
  for (int64_t s = 0; s < segments->size(0); ++s) result.push_back({numbers[2 * s], numbers[2 * s + 1]});
  return result;
}

inline PayloadFormat ParseFormat(const char* op, int64_t n, int64_t k, const std::string& coding,
                                 const std::string& dtype, const std::optional<Tensor>& segments) {
  return {n, k, ParseCoding(op, coding), ParseDType(op, dtype), ParseSegments(op, segments)};
}

// The inputs of an accumulation: gradient, error feedback and rule. The contiguous gradient and parameter must outlive
// it.
struct Accumulation {
  Array gradient;
  AccumulateParams params;
  Feedback feedback;
};

inline float* FeedbackData(const char* op, const char* name, Tensor& tensor, int64_t size,
                           at::Device device = at::kCPU) {
  CheckTensor(op, name, tensor, at::kFloat, device);
  TORCH_CHECK_VALUE(tensor.numel() == size, "hvd_sparse.", op, ": ", name, " must have ", size,
                    " elements, as many as the gradient; got ", tensor.numel());
  return tensor.mutable_data_ptr<float>();
}

// Checks the tensors, which must all be on the gradient's device.
inline Accumulation AsAccumulation(const char* op, const Tensor& gradient, Tensor& residual,
                                   std::optional<Tensor>& velocity, const std::optional<Tensor>& parameter,
                                   double factor, double momentum, bool nesterov, double weight_decay) {
  Accumulation result{AsArray(op, gradient), {}, {}};
  const at::Device device = gradient.device();
  result.feedback.residual = FeedbackData(op, "residual", residual, gradient.numel(), device);
  result.feedback.velocity = velocity ? FeedbackData(op, "velocity", *velocity, gradient.numel(), device) : nullptr;
  result.params.rule = !velocity  ? AccumulateRule::kResidual
                       : nesterov ? AccumulateRule::kNesterov
                                  : AccumulateRule::kMomentum;
  result.params.factor = static_cast<float>(factor);
  result.params.momentum = static_cast<float>(momentum);
  result.params.weight_decay = static_cast<float>(weight_decay);
  TORCH_CHECK_VALUE(weight_decay == 0 || parameter, "hvd_sparse.", op, ": weight_decay needs the parameter");
  if (weight_decay == 0) return result;
  CheckTensor(op, "parameter", *parameter, at::kFloat, device);
  TORCH_CHECK_VALUE(parameter->numel() == gradient.numel(), "hvd_sparse.", op, ": parameter must have ",
                    gradient.numel(), " elements, as many as the gradient; got ", parameter->numel());
  result.params.parameter = parameter->const_data_ptr<float>();
  return result;
}

}  // namespace hvd_sparse
