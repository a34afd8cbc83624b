// CPU kernels of the ops that change the error feedback, which is stored in resource variables, in place.
#include "../core/accumulate.h"
#include "../core/finite.h"
#include "feedback.h"

namespace hvd_sparse {
namespace {

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
    TF_RETURN_IF_ERROR(buffer.Open(call, call.context()->input(0)));
    const int64_t size = buffer.size();
    for (int64_t i = 0; i < count; ++i) {
      if (indices[i] < 0 || indices[i] >= size) return call.Invalid("index ", indices[i], " of ", size, " elements");
    }
    float* data = buffer.data();
    for (int64_t i = 0; i < count; ++i) data[indices[i]] = values[i];
    return absl::OkStatus();
  }
};

class AccumulateKernel : public AccumulatingKernel {
 public:
  explicit AccumulateKernel(OpKernelConstruction* construction) : AccumulatingKernel(construction, "accumulate") {
    OP_REQUIRES_OK(construction, ReadRule(construction));
  }

 protected:
  absl::Status Run(const Call& call) const override {
    Job job;
    Lists lists;
    float factor = 1;
    TF_RETURN_IF_ERROR(call.Number("factor", &factor));
    TF_RETURN_IF_ERROR(OpenLists(call, &lists));
    if (lists.velocities.size() > 1) return call.Invalid("there may be one velocity, got ", lists.velocities.size());
    if (lists.parameters.size() > 1) return call.Invalid("there may be one parameter, got ", lists.parameters.size());
    TF_RETURN_IF_ERROR(OpenMember(call, lists, 0, factor, &job));
    return call.OutputScalar("finite", lists.is_active ? Accumulate(job.gradient, job.params, call.Pool(), job.feedback)
                                                       : AllFinite(job.gradient, call.Pool()));
  }
};

HVD_SPARSE_REGISTER(ScatterUpdate);
HVD_SPARSE_REGISTER(Accumulate);

}  // namespace
}  // namespace hvd_sparse
