// Code shared by all kernels: inputs and outputs by name, errors that name the function, the thread pool.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <type_traits>
#include <vector>

#include "../core/denormals.h"
#include "../core/parallel.h"
#include "../core/payload.h"
#include "../core/select.h"
#include "absl/strings/str_cat.h"
#include "attributes.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

namespace hvd_sparse {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

// Returns the data of a tensor in row-major order. The op's interface restricts its type.
inline Array AsArray(const Tensor& tensor) {
  DType dtype = DType::kFloat32;
  switch (tensor.dtype()) {
    case tensorflow::DT_DOUBLE: dtype = DType::kFloat64; break;
    case tensorflow::DT_HALF: dtype = DType::kFloat16; break;
    case tensorflow::DT_BFLOAT16: dtype = DType::kBFloat16; break;
    default: break;
  }
  return {tensor.data(), tensor.NumElements(), dtype};
}

// Copies bytes in the memory of the kernel's device.
using CopyBytes = absl::Status (*)(OpKernelContext* context, void* to, const void* from, size_t size);

inline absl::Status CopyOnHost(OpKernelContext* /*context*/, void* to, const void* from, size_t size) {
  std::memcpy(to, from, size);
  return absl::OkStatus();
}

// One call of a kernel: its tensors by name, and errors that name the function.
class Call {
 public:
  Call(OpKernelContext* context, const char* verb, CopyBytes copy) : context_(context), verb_(verb), copy_(copy) {}

  absl::Status Copy(void* to, const void* from, size_t size) const { return copy_(context_, to, from, size); }

  template <typename... Parts>
  absl::Status Invalid(const Parts&... parts) const {
    return absl::InvalidArgumentError(absl::StrCat("hvd_sparse.", verb_, ": ", parts...));
  }

  // Refuses a variable that this call has opened already: it would wait for its own lock.
  absl::Status Claim(const void* variable) const {
    if (std::count(claimed_.begin(), claimed_.end(), variable) > 0) return Invalid("a variable is given twice");
    claimed_.push_back(variable);
    return absl::OkStatus();
  }

  absl::Status Report(const Status& status) const { return status.ok() ? absl::OkStatus() : Invalid(status.message); }

  template <typename T>
  absl::Status Number(const char* name, T* number) const {
    const Tensor* tensor = nullptr;
    TF_RETURN_IF_ERROR(context_->input(name, &tensor));
    if (!TensorShapeUtils::IsScalar(tensor->shape())) {
      return Invalid(name, " must be a scalar, got shape ", tensor->shape().DebugString());
    }
    *number = tensor->scalar<T>()();
    return absl::OkStatus();
  }

  absl::Status Seed(uint64_t* seed) const {
    int64_t number = 0;
    TF_RETURN_IF_ERROR(Number("seed", &number));
    *seed = static_cast<uint64_t>(number);
    return absl::OkStatus();
  }

  // Returns a one-dimensional input. The op's interface determines its type.
  template <typename T>
  absl::Status Vector(const char* name, const T** data, int64_t* size) const {
    const Tensor* tensor = nullptr;
    TF_RETURN_IF_ERROR(context_->input(name, &tensor));
    if (tensor->dims() != 1) {
      return Invalid(name, " must have one dimension, got shape ", tensor->shape().DebugString());
    }
    *data = static_cast<const T*>(tensor->data());
    *size = tensor->NumElements();
    return absl::OkStatus();
  }

  absl::Status GetSegments(Segments* segments) const {
    const Tensor* tensor = nullptr;
    TF_RETURN_IF_ERROR(context_->input("segments", &tensor));
    if (tensor->dims() != 2 || tensor->dim_size(1) != 2) {
      return Invalid("segments must be [segments, 2], got shape ", tensor->shape().DebugString());
    }
    const auto numbers = tensor->matrix<int64_t>();
    for (int64_t s = 0; s < tensor->dim_size(0); ++s) segments->push_back({numbers(s, 0), numbers(s, 1)});
    return absl::OkStatus();
  }

  // Returns the values, of any shape, in row-major order.
  absl::Status Values(Array* array) const {
    const Tensor* tensor = nullptr;
    TF_RETURN_IF_ERROR(context_->input("values", &tensor));
    *array = AsArray(*tensor);
    return absl::OkStatus();
  }

  template <typename T>
  absl::Status Output(const char* name, const TensorShape& shape, T** data) const {
    Tensor* tensor = nullptr;
    TF_RETURN_IF_ERROR(context_->allocate_output(name, shape, &tensor));
    *data = static_cast<T*>(tensor->data());
    return absl::OkStatus();
  }

  template <typename T>
  absl::Status OutputScalar(const char* name, T number) const {
    T* data = nullptr;
    TF_RETURN_IF_ERROR(Output(name, {}, &data));
    *data = number;
    return absl::OkStatus();
  }

  absl::Status OutputSelection(const Array& values, const Selection& selection) const {
    const std::vector<int64_t>& selected = selection.indices;
    const TensorShape shape({static_cast<int64_t>(selected.size())});
    double* info = nullptr;
    int64_t* indices = nullptr;
    TF_RETURN_IF_ERROR(Output("info", {2}, &info));
    TF_RETURN_IF_ERROR(Output("indices", shape, &indices));
    info[0] = selection.threshold;
    info[1] = static_cast<double>(selection.passed);
    std::copy(selected.begin(), selected.end(), indices);
    return Dispatch(values, [&](const auto* data) {
      std::decay_t<decltype(*data)>* out = nullptr;
      TF_RETURN_IF_ERROR(Output("selected", shape, &out));
      for (size_t j = 0; j < selected.size(); ++j) out[j] = data[selected[j]];
      return absl::OkStatus();
    });
  }

  // Returns TensorFlow's thread pool for the work inside one op. The calling thread works, too. TensorFlow's own
  // threads flush denormals to zero, and must not be left by an exception.
  ParallelFor Pool() const {
    auto* workers = context_->device()->tensorflow_cpu_worker_threads()->workers;
    return [workers](int64_t begin, int64_t end, int64_t grain, const RangeFunction& body) {
      constexpr int64_t kWorthAThread = int64_t{1} << 20;  // cycles; a part has at least the work of a grain
      if (begin >= end) return;
      const int64_t size = end - begin;
      const int64_t parts = std::clamp<int64_t>(size / grain, 1, workers->NumThreads());
      std::mutex mutex;
      std::exception_ptr failure;
      tensorflow::Shard(workers->NumThreads(), workers, parts, kWorthAThread, [&](int64_t first, int64_t last) {
        const KeepDenormals keep;
        try {
          body(begin + size * first / parts, begin + size * last / parts);
        } catch (...) {
          const std::lock_guard<std::mutex> lock(mutex);
          failure = std::current_exception();
        }
      });
      if (failure) std::rethrow_exception(failure);
    };
  }

  OpKernelContext* context() const { return context_; }

 private:
  OpKernelContext* context_;
  const char* verb_;
  CopyBytes copy_;
  mutable std::vector<const void*> claimed_;  // variables that are open
};

class Kernel : public tensorflow::OpKernel {
 public:
  Kernel(OpKernelConstruction* construction, const char* verb, CopyBytes copy = CopyOnHost)
      : OpKernel(construction), verb_(verb), copy_(copy) {}

  void Compute(OpKernelContext* context) final {
    const KeepDenormals keep;
    try {
      OP_REQUIRES_OK(context, Run(Call(context, verb_, copy_)));
    } catch (const std::bad_alloc&) {  // TensorFlow knows no exceptions: the process would end
      OP_REQUIRES(context, false, absl::ResourceExhaustedError(absl::StrCat("hvd_sparse.", verb_, ": out of memory")));
    } catch (const std::exception& error) {
      OP_REQUIRES(context, false, absl::InternalError(absl::StrCat("hvd_sparse.", verb_, ": ", error.what())));
    } catch (...) {
      OP_REQUIRES(context, false, absl::InternalError(absl::StrCat("hvd_sparse.", verb_, ": unknown exception")));
    }
  }

 protected:
  virtual absl::Status Run(const Call& call) const = 0;

 private:
  const char* verb_;
  CopyBytes copy_;
};

// The base class of kernels that read or write payloads.
class FormatKernel : public Kernel {
 public:
  FormatKernel(OpKernelConstruction* construction, const char* verb) : Kernel(construction, verb) {
    OP_REQUIRES_OK(construction, GetFormat(construction, &attributes_));
  }

 protected:
  // Returns the payload format from the attributes and the inputs n, k and segments, and the payload's size in bytes.
  absl::Status Format(const Call& call, PayloadFormat* format, int64_t* size) const {
    *format = attributes_;
    TF_RETURN_IF_ERROR(call.GetSegments(&format->segments));
    TF_RETURN_IF_ERROR(call.Number("n", &format->n));
    TF_RETURN_IF_ERROR(call.Number("k", &format->k));
    return call.Report(PayloadSize(*format, size));
  }

  absl::Status CheckValueType(const Call& call, tensorflow::DataType dtype) const {
    const bool wide = attributes_.dtype == DType::kFloat64;
    if (wide == (dtype == tensorflow::DT_DOUBLE)) return absl::OkStatus();
    return call.Invalid("values must be ", wide ? "float64, got float32" : "float32, got float64");
  }

  PayloadFormat attributes_;
};

}  // namespace hvd_sparse

#define HVD_SPARSE_REGISTER(name) \
  REGISTER_KERNEL_BUILDER(Name("HvdSparse" #name).Device(tensorflow::DEVICE_CPU), name##Kernel)
