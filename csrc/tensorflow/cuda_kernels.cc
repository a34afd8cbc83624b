// GPU kernels of the ops on single tensors. They check arguments, launch kernels, and report errors; only the sum of
// payloads waits for the device. The other ops on single tensors run on the CPU.
#include "../core/threshold.h"
#include "../cuda/accumulate.h"
#include "../cuda/finite.h"
#include "../cuda/pack.h"
#include "../cuda/select.h"
#include "cuda_call.h"
#include "feedback.h"

namespace hvd_sparse {

// hvd_sparse/library.py searches the library for this string.
__attribute__((used)) extern const char kCudaMark[] = "hvd_sparse was built with CUDA";

namespace {

class CudaSelectTopKKernel : public Kernel {
 public:
  explicit CudaSelectTopKKernel(OpKernelConstruction* construction) : Kernel(construction, "select_top_k") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Array values;
    SelectParams params;
    DeviceWork work;
    SelectOutput output{};
    int64_t size = 0;
    void* workspace = nullptr;
    TF_RETURN_IF_ERROR(call.Values(&values));
    TF_RETURN_IF_ERROR(call.Number("k", &params.k));
    TF_RETURN_IF_ERROR(call.Seed(&params.seed));
    TF_RETURN_IF_ERROR(call.Number("threshold_hint", &params.threshold_hint));
    TF_RETURN_IF_ERROR(call.Report(CheckCount(params.k, values.size)));
    TF_RETURN_IF_ERROR(call.Output("indices", {params.k}, &output.indices));
    TF_RETURN_IF_ERROR(call.Output("selected", {params.k}, &output.values));
    TF_RETURN_IF_ERROR(call.Output("info", {2}, &output.info));
    TF_RETURN_IF_ERROR(work.Open(call));
    TF_RETURN_IF_ERROR(CudaStatus(select_top_k_workspace_size(values.dtype, values.size, params.k, &size)));
    TF_RETURN_IF_ERROR(work.Allocate(size, &workspace));
    return CudaStatus(select_top_k_launch(values, params, output, workspace, work.stream()));
  }
};

class CudaAllFiniteKernel : public Kernel {
 public:
  explicit CudaAllFiniteKernel(OpKernelConstruction* construction) : Kernel(construction, "all_finite") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Array values;
    DeviceWork work;
    bool* finite = nullptr;
    TF_RETURN_IF_ERROR(call.Values(&values));
    TF_RETURN_IF_ERROR(call.Output("finite", {}, &finite));
    TF_RETURN_IF_ERROR(work.Open(call));
    return CudaStatus(all_finite_launch(values, finite, work.stream()));
  }
};

class CudaAccumulateKernel : public FeedbackKernel {
 public:
  explicit CudaAccumulateKernel(OpKernelConstruction* construction) : FeedbackKernel(construction, CopyOnDevice) {}

 protected:
  absl::Status Run(const Call& call) const override {
    Job job;
    DeviceWork work;
    bool* finite = nullptr;
    TF_RETURN_IF_ERROR(Open(call, &job));
    TF_RETURN_IF_ERROR(call.Output("finite", {}, &finite));
    TF_RETURN_IF_ERROR(work.Open(call));
    if (!job.is_active) return CudaStatus(all_finite_launch(job.gradient, finite, work.stream()));
    TF_RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(finite, 1, sizeof(bool), work.stream())));
    return CudaStatus(
        accumulate_launch(MakeAccumulateJob(job.gradient, job.params, job.feedback, finite), work.stream()));
  }
};

class CudaPackKernel : public FormatKernel {
 public:
  explicit CudaPackKernel(OpKernelConstruction* construction) : FormatKernel(construction, "pack") {}

 protected:
  absl::Status Run(const Call& call) const override {
    PayloadFormat format;
    PayloadPlan plan{};
    DeviceWork work;
    int64_t size = 0, entries = 0, count = 0;
    const int64_t* indices = nullptr;
    const void* values = nullptr;
    uint8_t* payload = nullptr;
    void* workspace = nullptr;
    TF_RETURN_IF_ERROR(Format(call, &format, &size));
    TF_RETURN_IF_ERROR(CheckValueType(call, call.context()->input_dtype(1)));
    TF_RETURN_IF_ERROR(PlanOf(call, format, &plan));
    TF_RETURN_IF_ERROR(call.Vector("indices", &indices, &entries));
    TF_RETURN_IF_ERROR(call.Vector("values", &values, &count));
    if (entries != count) return call.Invalid(entries, " indices but ", count, " values");
    if (entries != 0 && entries != format.k) {
      return call.Invalid("a payload holds k = ", format.k, " entries or none, got ", entries);
    }
    TF_RETURN_IF_ERROR(call.Output("payload", {size}, &payload));
    TF_RETURN_IF_ERROR(work.Open(call));
    TF_RETURN_IF_ERROR(work.Allocate(pack_workspace_size(plan), &workspace));
    return CudaStatus(pack_launch(plan, indices, values, entries, payload, workspace, work.stream()));
  }
};

class CudaReducePayloadsKernel : public FormatKernel {
 public:
  explicit CudaReducePayloadsKernel(OpKernelConstruction* construction)
      : FormatKernel(construction, "reduce_payloads") {}

 protected:
  absl::Status Run(const Call& call) const override {
    PayloadFormat format;
    PayloadPlan plan{};
    DeviceWork work;
    int64_t size = 0, offset = 0;
    float scale = 0;
    float* sum = nullptr;
    void* workspace = nullptr;
    DecodeStatus* status = nullptr;
    TF_RETURN_IF_ERROR(Format(call, &format, &size));
    TF_RETURN_IF_ERROR(PlanOf(call, format, &plan));
    TF_RETURN_IF_ERROR(call.Number("offset", &offset));
    TF_RETURN_IF_ERROR(call.Number("scale", &scale));
    const Tensor& gathered = call.context()->input(0);
    if (gathered.dims() != 2 || offset < 0 || size > gathered.dim_size(1) - offset) {
      return call.Invalid("gathered must be [ranks, bytes] with ", size, " bytes at offset ", offset, ", got ",
                          gathered.shape().DebugString());
    }
    const int64_t ranks = gathered.dim_size(0);
    TF_RETURN_IF_ERROR(call.Report(CheckRanks(ranks)));
    TF_RETURN_IF_ERROR(call.Output("sum", {format.n}, &sum));
    TF_RETURN_IF_ERROR(work.Open(call));
    TF_RETURN_IF_ERROR(work.Allocate(reduce_payloads_workspace_size(plan, ranks), &workspace));
    TF_RETURN_IF_ERROR(work.AllocateStatus(&status));
    const auto* first = static_cast<const uint8_t*>(gathered.data()) + offset;
    TF_RETURN_IF_ERROR(CudaStatus(reduce_payloads_launch(plan, first, ranks, gathered.dim_size(1), scale, sum, status,
                                                         workspace, work.stream())));
    return work.CheckDecoded(call, status);
  }
};

#define HVD_SPARSE_FORMAT HostMemory("n").HostMemory("k").HostMemory("segments")
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(SelectTopK).HostMemory("k").HostMemory("seed").HostMemory("threshold_hint"),
                        CudaSelectTopKKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(AllFinite), CudaAllFiniteKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(Accumulate).HostMemory("factor").HostMemory("is_active"),
                        CudaAccumulateKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(Pack).HVD_SPARSE_FORMAT, CudaPackKernel);
REGISTER_KERNEL_BUILDER(HVD_SPARSE_ON_GPU(ReducePayloads).HVD_SPARSE_FORMAT.HostMemory("offset").HostMemory("scale"),
                        CudaReducePayloadsKernel);

}  // namespace
}  // namespace hvd_sparse
