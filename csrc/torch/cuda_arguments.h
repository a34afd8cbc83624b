// Code shared by all ops on CUDA tensors: device, current stream, memory from PyTorch's allocator, errors.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "../cuda/plan.h"
#include "../cuda/reduce.h"
#include "arguments.h"

#ifdef HVD_SPARSE_C10_CUDA  // PyTorch was built with CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace hvd_sparse {

inline void RaiseCuda(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // forgets this error: otherwise the next op would report it, too
  TORCH_CHECK(false, "hvd_sparse.", op, ": CUDA error ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

inline cudaStream_t CurrentStream(at::Device device) {
#ifdef HVD_SPARSE_C10_CUDA
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#else
  const c10::impl::VirtualGuardImpl guard(device.type());
  return static_cast<cudaStream_t>(guard.getStream(device).native_handle());
#endif
}

// While this object lives, the device of the op's tensors is the current device.
class CudaCall {
 public:
  // `leading` determines the device. The other tensors must be on the same device.
  CudaCall(const char* op, const char* name, const Tensor& leading) : op_(op), guard_(Check(op, name, leading)) {
    device_ = leading.device();
    Run(cudaSetDevice(device_.index()));  // the CUDA runtime linked here has a separate current device
    stream_ = CurrentStream(device_);
  }

  void Run(cudaError_t error) const { RaiseCuda(op_, error); }
  void Check(const Status& status) const { Raise(op_, status); }
  void CheckTensorHere(const char* name, const Tensor& tensor, at::ScalarType dtype) const {
    CheckTensor(op_, name, tensor, dtype, device_);
  }

  Tensor Empty(at::IntArrayRef shape, at::ScalarType dtype) const {
    return at::empty(shape, at::TensorOptions().device(device_).dtype(dtype));
  }
  Tensor Bytes(int64_t size) const { return Empty({size}, at::kByte); }

  // Returns the decode status of this device, which persists across calls.
  DecodeStatus* decode_status() const;

  const char* op() const { return op_; }
  at::Device device() const { return device_; }
  cudaStream_t stream() const { return stream_; }

 private:
  static at::Device Check(const char* op, const char* name, const Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.is_cuda(), "hvd_sparse.", op, ": ", name,
                      " must be a CUDA tensor, as the others are; got ", tensor.device());
    return tensor.device();
  }

  const char* op_;
  c10::DeviceGuard guard_;
  at::Device device_ = at::kCUDA;
  cudaStream_t stream_ = nullptr;
};

// Returns the DecodeStatus of a device as an int64[2] tensor on this device, initially zero. It is never freed.
Tensor DecodeStatusOf(at::Device device);

inline DecodeStatus* CudaCall::decode_status() const {
  return static_cast<DecodeStatus*>(DecodeStatusOf(device_).data_ptr());
}

inline PayloadPlan ParsePlan(const CudaCall& call, int64_t n, int64_t k, const std::string& coding,
                             const std::string& dtype, const std::optional<Tensor>& segments) {
  PayloadPlan plan{};
  call.Check(MakePlan(ParseFormat(call.op(), n, k, coding, dtype, segments), &plan));
  return plan;
}

inline void CheckAligned(const CudaCall& call, const char* name, const void* payload) {
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(payload) % 8 == 0, "hvd_sparse.", call.op(), ": a payload in ", name,
                    " must start at a multiple of 8 bytes on a CUDA device");
}

}  // namespace hvd_sparse
