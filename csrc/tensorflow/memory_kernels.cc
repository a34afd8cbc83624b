// CPU kernels of the ops that change a worker's memory, which lies in resource variables, in place.
#include <cstring>
#include <optional>

#include "../core/accumulate.h"
#include "../core/finite.h"
#include "../core/select.h"
#include "kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace hvd_sparse {
namespace {

// A float32 vector that a resource holds, locked and this kernel's own while the object lives.
class Buffer {
 public:
  absl::Status Open(const Call& call, const tensorflow::ResourceHandle& handle) {
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(call.context(), handle, &variable_));
    lock_.emplace(*variable_->mu());
    return Own(call, variable_->tensor());
  }

  float* data() const { return variable_->tensor()->flat<float>().data(); }
  int64_t size() const { return variable_->tensor()->NumElements(); }

 private:
  // Whoever has read the variable may still hold its buffer: the variable then goes on with a copy.
  static absl::Status Own(const Call& call, Tensor* tensor) {
    if (tensor->dtype() != tensorflow::DT_FLOAT || tensor->dims() != 1) {
      return call.Invalid("the variable must be float32 with one dimension");
    }
    if (tensor->RefCountIsOne()) return absl::OkStatus();
    Tensor copy;
    TF_RETURN_IF_ERROR(call.context()->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
    std::memcpy(copy.data(), tensor->data(), tensor->TotalBytes());
    *tensor = copy;
    return absl::OkStatus();
  }

  tensorflow::core::RefCountPtr<tensorflow::Var> variable_;
  std::optional<tensorflow::mutex_lock> lock_;  // before the variable that it locks is let go
};

class ScatterUpdateKernel : public Kernel {
 public:
  explicit ScatterUpdateKernel(OpKernelConstruction* construction) : Kernel(construction, "scatter_update") {}

 protected:
  absl::Status Run(const Call& call) const override {
    const int64_t* indices = nullptr;
    const float* values = nullptr;
    int64_t count = 0, value_count = 0;
    TF_RETURN_IF_ERROR(call.Vector("indices", &indices, &count));
    TF_RETURN_IF_ERROR(call.Vector("values", &values, &value_count));
    if (count != value_count) return call.Invalid(count, " indices but ", value_count, " values");
    Buffer buffer;
    TF_RETURN_IF_ERROR(buffer.Open(call, tensorflow::HandleFromInput(call.context(), 0)));
    for (int64_t i = 0; i < count; ++i) {
      if (indices[i] < 0 || indices[i] >= buffer.size()) {
        return call.Invalid("index ", indices[i], " of ", buffer.size(), " elements");
      }
    }
    for (int64_t i = 0; i < count; ++i) buffer.data()[indices[i]] = values[i];
    return absl::OkStatus();
  }
};

// What both ways of accumulating share: a gradient, its memory and the rule.
class MemoryKernel : public Kernel {
 public:
  MemoryKernel(OpKernelConstruction* construction, const char* verb) : Kernel(construction, verb) {
    bool nesterov = false;
    OP_REQUIRES_OK(construction, construction->GetAttr("momentum", &params_.momentum));
    OP_REQUIRES_OK(construction, construction->GetAttr("weight_decay", &params_.weight_decay));
    OP_REQUIRES_OK(construction, construction->GetAttr("nesterov", &nesterov));
    params_.rule = nesterov ? AccumulateRule::kNesterov : AccumulateRule::kMomentum;
  }

 protected:
  struct Job {
    Array gradient;
    AccumulateParams params;
    Buffer residual;
    Buffer velocity;
    Memory memory;
    bool is_active = true;
  };

  absl::Status Open(const Call& call, Job* job) const {
    job->params = params_;
    TF_RETURN_IF_ERROR(call.Values(&job->gradient, "gradient"));
    TF_RETURN_IF_ERROR(call.Number("factor", &job->params.factor));
    TF_RETURN_IF_ERROR(call.Number("is_active", &job->is_active));
    tensorflow::OpInputList velocity, parameter;
    TF_RETURN_IF_ERROR(call.context()->input_list("velocity", &velocity));
    TF_RETURN_IF_ERROR(call.context()->input_list("parameter", &parameter));
    if (params_.weight_decay != 0 && parameter.size() != 1) return call.Invalid("weight_decay needs the parameter");
    if (velocity.size() > 1) return call.Invalid("there may be one velocity, got ", velocity.size());
    TF_RETURN_IF_ERROR(job->residual.Open(call, tensorflow::HandleFromInput(call.context(), 2)));
    job->memory = {job->residual.data(), nullptr};
    TF_RETURN_IF_ERROR(CheckSize(call, "residual", job->residual.size(), job->gradient.size));
    if (velocity.size() == 0) {
      job->params.rule = AccumulateRule::kResidual;
    } else {
      TF_RETURN_IF_ERROR(job->velocity.Open(call, velocity[0].scalar<tensorflow::ResourceHandle>()()));
      TF_RETURN_IF_ERROR(CheckSize(call, "velocity", job->velocity.size(), job->gradient.size));
      job->memory.velocity = job->velocity.data();
    }
    if (params_.weight_decay == 0) return absl::OkStatus();
    job->params.parameter = parameter[0].flat<float>().data();
    return CheckSize(call, "parameter", parameter[0].NumElements(), job->gradient.size);
  }

 private:
  static absl::Status CheckSize(const Call& call, const char* name, int64_t size, int64_t expected) {
    if (size == expected) return absl::OkStatus();
    return call.Invalid(name, " must have ", expected, " elements, as many as the gradient; got ", size);
  }

  AccumulateParams params_;
};

class AccumulateKernel : public MemoryKernel {
 public:
  explicit AccumulateKernel(OpKernelConstruction* construction) : MemoryKernel(construction, "accumulate") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Job job;
    TF_RETURN_IF_ERROR(Open(call, &job));
    return call.OutputScalar("finite", job.is_active ? Accumulate(job.gradient, job.params, call.Pool(), job.memory)
                                                     : AllFinite(job.gradient, call.Pool()));
  }
};

class AccumulateTopKKernel : public MemoryKernel {
 public:
  explicit AccumulateTopKKernel(OpKernelConstruction* construction) : MemoryKernel(construction, "accumulate_top_k") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Job job;
    SelectParams select;
    TF_RETURN_IF_ERROR(call.Number("k", &select.k));
    TF_RETURN_IF_ERROR(call.Seed(&select.seed));
    TF_RETURN_IF_ERROR(call.Number("threshold_hint", &select.threshold_hint));
    TF_RETURN_IF_ERROR(Open(call, &job));
    const Array residual{job.memory.residual, job.gradient.size, DType::kFloat32};
    bool finite = true;
    Selection selection;
    if (job.is_active) {
      TF_RETURN_IF_ERROR(
          call.Report(AccumulateTopK(job.gradient, job.params, select, call.Pool(), job.memory, &finite, &selection)));
    } else {
      finite = AllFinite(job.gradient, call.Pool());
      TF_RETURN_IF_ERROR(call.Report(SelectTopK(residual, select, call.Pool(), &selection)));
    }
    TF_RETURN_IF_ERROR(call.OutputScalar("finite", finite));
    return call.OutputSelection(residual, selection);
  }
};

HVD_SPARSE_REGISTER(ScatterUpdate);
HVD_SPARSE_REGISTER(Accumulate);
HVD_SPARSE_REGISTER(AccumulateTopK);

}  // namespace
}  // namespace hvd_sparse
