// GPU kernels that process a bucket of variables in one call. Those that read payloads wait for the device, and return
// an error if a payload is damaged; the others do not wait.
#include "../cuda/bucket.h"
#include "bucket.h"
#include "cuda_call.h"

namespace hvd_sparse {
namespace {

// Launchers read residuals as float32, so float64 values cannot be sent.
absl::Status CheckValues(const Call& call, const PayloadFormat& format) {
  if (format.dtype != DType::kFloat64) return absl::OkStatus();
  return call.Invalid("residuals are float32, and so is what is sent of them on a GPU; got value_dtype float64");
}

class CudaAccumulateBucketKernel : public AccumulateBucketBase {
 public:
  explicit CudaAccumulateBucketKernel(OpKernelConstruction* construction)
      : AccumulateBucketBase(construction, CopyOnDevice) {}

 protected:
  absl::Status Fill(const Call& call, const std::vector<Filling>& fillings, bool active, Level level, double* info,
                    bool* finite) const override {
    BucketSelections selections;
    for (const Filling& filling : fillings) {
      TF_RETURN_IF_ERROR(CheckValues(call, filling.format));
      BucketSelection selection{};
      TF_RETURN_IF_ERROR(PlanOf(call, filling.format, &selection.plan));
      selection.parts = filling.parts;
      selection.select = filling.select;
      selection.payload = filling.payload;
      selections.push_back(std::move(selection));
    }
    DeviceWork work;
    int64_t size = 0;
    void* workspace = nullptr;
    TF_RETURN_IF_ERROR(work.Open(call));
    TF_RETURN_IF_ERROR(CudaStatus(accumulate_bucket_workspace_size(selections, &size)));
    TF_RETURN_IF_ERROR(work.Allocate(size, &workspace));
    return CudaStatus(accumulate_bucket_launch(selections, active, level, info, finite, workspace, work.stream()));
  }
};

class CudaClearBucketKernel : public ClearBucketBase {
 public:
  explicit CudaClearBucketKernel(OpKernelConstruction* construction) : ClearBucketBase(construction, CopyOnDevice) {}

 protected:
  absl::Status Clear(const Call& call, const std::vector<Clearing>& clearings) const override {
    ReduceSelections selections;
    for (const Clearing& clearing : clearings) {
      selections.push_back({{}, clearing.payload, clearing.slices});
      TF_RETURN_IF_ERROR(PlanOf(call, clearing.format, &selections.back().plan));
    }
    DeviceWork work;
    void* workspace = nullptr;
    DecodeStatus* status = nullptr;
    TF_RETURN_IF_ERROR(work.Open(call));
    TF_RETURN_IF_ERROR(work.Allocate(reduce_workspace_size(selections, 1), &workspace));
    TF_RETURN_IF_ERROR(work.AllocateStatus(&status));
    TF_RETURN_IF_ERROR(CudaStatus(clear_launch(selections, retained_, status, workspace, work.stream())));
    return work.CheckDecoded(call, status, true);
  }
};

class CudaReduceBucketKernel : public ReduceBucketBase {
 public:
  using ReduceBucketBase::ReduceBucketBase;

 protected:
  absl::Status Reduce(const Call& call, const std::vector<Summing>& summings, int64_t ranks, int64_t stride,
                      float scale) const override {
    ReduceSelections selections;
    for (const Summing& summing : summings) {
      selections.push_back({{}, summing.first, {}});
      for (const Slice& slice : summing.slices) {
        selections.back().slices.push_back({slice.begin, slice.size, {slice.out, nullptr}});
      }
      TF_RETURN_IF_ERROR(PlanOf(call, summing.format, &selections.back().plan));
    }
    DeviceWork work;
    void* workspace = nullptr;
    DecodeStatus* status = nullptr;
    TF_RETURN_IF_ERROR(work.Open(call));
    TF_RETURN_IF_ERROR(work.Allocate(reduce_workspace_size(selections, ranks), &workspace));
    TF_RETURN_IF_ERROR(work.AllocateStatus(&status));
    TF_RETURN_IF_ERROR(CudaStatus(reduce_launch(selections, ranks, stride, scale, status, workspace, work.stream())));
    return work.CheckDecoded(call, status);
  }
};

class CudaTakeSumKernel : public TakeSumBase {
 public:
  using TakeSumBase::TakeSumBase;

 protected:
  absl::Status Spoil(const Call& call, float* out, int64_t n) const override {
    DeviceWork work;
    TF_RETURN_IF_ERROR(work.Open(call));
    constexpr int kNanByte = 0xff;  // four of these bytes are a NaN
    return CudaStatus(cudaMemsetAsync(out, kNanByte, static_cast<size_t>(n) * sizeof(float), work.stream()));
  }
};

REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(AccumulateBucket)
                            .HostMemory("factors")
                            .HostMemory("is_active")
                            .HostMemory("ks")
                            .HostMemory("seed")
                            .HostMemory("threshold_hints"),
                        CudaAccumulateBucketKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(ClearBucket).HostMemory("ks").HostMemory("is_skipped"),
                        CudaClearBucketKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(ReduceBucket).HostMemory("ranks").HostMemory("ks").HostMemory("scale"),
                        CudaReduceBucketKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(TakeSum).HostMemory("token").HostMemory("expected").HostMemory("is_skipped"),
                        CudaTakeSumKernel);

}  // namespace
}  // namespace hvd_sparse
