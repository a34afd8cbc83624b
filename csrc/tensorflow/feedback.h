// The error feedback of one or several variables: resource variables that a kernel opens, locks and changes in place.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <vector>

#include "../core/accumulate.h"
#include "kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace hvd_sparse {

// The float32 vector of a resource variable. While this object lives, the variable is locked and no one else has its
// buffer.
class Buffer {
 public:
  absl::Status Open(const Call& call, const Tensor& handle) {
    if (!TensorShapeUtils::IsScalar(handle.shape())) {
      return call.Invalid("a variable's handle must be a scalar, got shape ", handle.shape().DebugString());
    }
    const auto& resource = handle.scalar<tensorflow::ResourceHandle>()();
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(call.context(), resource, &variable_));
    TF_RETURN_IF_ERROR(call.Claim(variable_.get()));
    lock_.emplace(*variable_->mu());
    return Own(call, variable_->tensor());
  }

  float* data() const { return variable_->tensor()->flat<float>().data(); }
  int64_t size() const { return variable_->tensor()->NumElements(); }

 private:
  // Ensures that no one else has the buffer. If an earlier reader still has it, the variable continues with a copy.
  static absl::Status Own(const Call& call, Tensor* tensor) {
    if (tensor->dtype() != tensorflow::DT_FLOAT || tensor->dims() != 1) {
      return call.Invalid("the variable must be float32 with one dimension");
    }
    if (tensor->RefCountIsOne()) return absl::OkStatus();
    Tensor copy;
    TF_RETURN_IF_ERROR(call.context()->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
    TF_RETURN_IF_ERROR(call.Copy(copy.data(), tensor->data(), tensor->TotalBytes()));
    *tensor = copy;
    return absl::OkStatus();
  }

  tensorflow::core::RefCountPtr<tensorflow::Var> variable_;
  std::optional<tensorflow::mutex_lock> lock_;  // must be released before the variable
};

// The base class of kernels that accumulate gradients: inputs, error feedback and the rule.
class AccumulatingKernel : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  absl::Status ReadRule(OpKernelConstruction* construction) {
    bool nesterov = false;
    TF_RETURN_IF_ERROR(construction->GetAttr("momentum", &params_.momentum));
    TF_RETURN_IF_ERROR(construction->GetAttr("weight_decays", &weight_decays_));
    TF_RETURN_IF_ERROR(construction->GetAttr("nesterov", &nesterov));
    params_.rule = nesterov ? AccumulateRule::kNesterov : AccumulateRule::kMomentum;
    return absl::OkStatus();
  }

  // The inputs: lists with one entry for each member, or empty lists.
  struct Lists {
    tensorflow::OpInputList gradients, residuals, velocities, parameters;
    bool is_active = true;
  };

  // One member during the call.
  struct Job {
    Array gradient;
    AccumulateParams params;
    Buffer residual;
    Buffer velocity;
    Feedback feedback;
  };

  absl::Status OpenLists(const Call& call, Lists* lists) const {
    TF_RETURN_IF_ERROR(call.context()->input_list("gradient", &lists->gradients));
    TF_RETURN_IF_ERROR(call.context()->input_list("residual", &lists->residuals));
    TF_RETURN_IF_ERROR(call.context()->input_list("velocity", &lists->velocities));
    TF_RETURN_IF_ERROR(call.context()->input_list("parameter", &lists->parameters));
    TF_RETURN_IF_ERROR(call.Number("is_active", &lists->is_active));
    const size_t members = static_cast<size_t>(lists->gradients.size());
    if (!weight_decays_.empty() && weight_decays_.size() != members) {
      return call.Invalid("weight_decays must have ", members, " entries, one a member, or none");
    }
    const bool decays = std::any_of(weight_decays_.begin(), weight_decays_.end(), [](float one) { return one != 0; });
    if (decays && lists->parameters.size() == 0) return call.Invalid("weight_decay needs the parameter");
    return absl::OkStatus();
  }

  // others: the other inputs, which must have one number for each member.
  static absl::Status CheckMembers(const Call& call, const Lists& lists, std::initializer_list<NamedList> others) {
    const auto members = static_cast<size_t>(lists.gradients.size());
    TF_RETURN_IF_ERROR(call.Report(CheckCounts("member", members, others)));
    return call.Report(CheckCounts("member", members,
                                   {{"residuals", lists.residuals.size()},
                                    Optional("velocities", lists.velocities.size(), members),
                                    Optional("parameters", lists.parameters.size(), members)}));
  }

  absl::Status OpenMember(const Call& call, const Lists& lists, int member, float factor, Job* job) const {
    job->params = params_;
    job->params.factor = factor;
    job->gradient = AsArray(lists.gradients[member]);
    TF_RETURN_IF_ERROR(job->residual.Open(call, lists.residuals[member]));
    TF_RETURN_IF_ERROR(CheckSize(call, "residual", job->residual.size(), job->gradient.size));
    job->feedback = {job->residual.data(), nullptr};
    if (lists.velocities.size() == 0) {
      job->params.rule = AccumulateRule::kResidual;
    } else {
      TF_RETURN_IF_ERROR(job->velocity.Open(call, lists.velocities[member]));
      TF_RETURN_IF_ERROR(CheckSize(call, "velocity", job->velocity.size(), job->gradient.size));
      job->feedback.velocity = job->velocity.data();
    }
    if (!weight_decays_.empty()) job->params.weight_decay = weight_decays_[static_cast<size_t>(member)];
    if (job->params.weight_decay == 0) return absl::OkStatus();  // the parameter is not read
    job->params.parameter = lists.parameters[member].flat<float>().data();
    return CheckSize(call, "parameter", lists.parameters[member].NumElements(), job->gradient.size);
  }

 private:
  static absl::Status CheckSize(const Call& call, const char* name, int64_t size, int64_t expected) {
    if (size == expected) return absl::OkStatus();
    return call.Invalid(name, " must have ", expected, " elements, as many as the gradient; got ", size);
  }

  AccumulateParams params_;
  std::vector<float> weight_decays_;  // one for each member, or empty
};

}  // namespace hvd_sparse
