// Code shared by all GPU kernels: device, stream, memory from TensorFlow's allocator, errors.
//
// It needs only TensorFlow's headers, even those of a TensorFlow without CUDA, because the stream is passed as a
// pointer. Numbers that determine the work are in host memory, as the registrations declare; tensors are on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <iterator>
#include <string>

#include "../cuda/plan.h"
#include "../cuda/reduce.h"
#include "kernel.h"
#include "tensorflow/core/framework/device_base.h"
#include "xla/stream_executor/stream.h"

namespace hvd_sparse {

inline absl::Status CudaStatus(cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();  // forgets this error: otherwise the next op would report it, too
  return absl::InternalError(
      absl::StrCat("hvd_sparse: CUDA error ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
}

// Makes the kernel's device current. The CUDA runtime linked here has a separate current device.
inline absl::Status OpenStream(OpKernelContext* context, cudaStream_t* stream) {
  TF_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(context->device()->tensorflow_accelerator_device_info()->gpu_id)));
  auto* own = context->op_device_context()->stream();
  *stream = static_cast<cudaStream_t>(own->platform_specific_handle().stream);
  return absl::OkStatus();
}

inline absl::Status CopyOnDevice(OpKernelContext* context, void* to, const void* from, size_t size) {
  cudaStream_t stream = nullptr;
  TF_RETURN_IF_ERROR(OpenStream(context, &stream));
  return CudaStatus(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream));
}

// The stream and workspaces of one call. The workspaces are freed before the device has finished with them. This is
// safe because TensorFlow reuses the memory only on the same stream, after this work.
class DeviceWork {
 public:
  absl::Status Open(const Call& call) {
    context_ = call.context();
    return OpenStream(context_, &stream_);
  }

  absl::Status Allocate(int64_t size, void** workspace) {
    Tensor tensor;
    TF_RETURN_IF_ERROR(context_->allocate_temp(tensorflow::DT_UINT8, TensorShape({size}), &tensor));
    *workspace = tensor.data();
    held_.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  // Allocates a status without failures, for a launcher and `CheckDecoded`.
  absl::Status AllocateStatus(DecodeStatus** status) {
    void* memory = nullptr;
    TF_RETURN_IF_ERROR(Allocate(sizeof(DecodeStatus), &memory));
    *status = static_cast<DecodeStatus*>(memory);
    return CudaStatus(cudaMemsetAsync(memory, 0, sizeof(DecodeStatus), stream_));
  }

  // Waits for the device, and returns an error if a payload was damaged. is_own: the payloads are this rank's.
  absl::Status CheckDecoded(const Call& call, const DecodeStatus* status, bool is_own = false) const {
    static constexpr const char* kFields[] = {"magic",           "version", "coding",   "value dtype", "reserved field",
                                              "element count n", "entries", "checksum", "positions"};
    DecodeStatus found{};
    TF_RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(&found, status, sizeof found, cudaMemcpyDeviceToHost, stream_)));
    TF_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_)));
    if (found.refused == 0) return absl::OkStatus();
    const auto field = static_cast<size_t>(found.first % kChecksEach - 1);
    const std::string rank = is_own ? "" : absl::StrCat("from rank ", found.first / kChecksEach, ": ");
    return call.Invalid(rank, "payload ", field < std::size(kFields) ? kFields[field] : "format", " is wrong");
  }

  cudaStream_t stream() const { return stream_; }

 private:
  OpKernelContext* context_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::vector<Tensor> held_;
};

inline absl::Status PlanOf(const Call& call, const PayloadFormat& format, PayloadPlan* plan) {
  return call.Report(MakePlan(format, plan));
}

}  // namespace hvd_sparse

// Add HostMemory for tensors on the host. Without a request for the GPU, the CPU kernels are chosen: payloads come from
// the host. hvd_sparse/tensorflow/devices.py says when a step requests it.
#define HVD_SPARSE_ON_GPU(name) Name("HvdSparse" #name).Device(tensorflow::DEVICE_GPU).Priority(-1)
