// CPU kernels that work on a bucket of variables whose numbers of entries vary, in one call.
#include <string>
#include <utility>
#include <vector>

#include "../core/bucket.h"
#include "../core/reduce.h"
#include "memory.h"

namespace hvd_sparse {
namespace {

class FilterBucketKernel : public AccumulatingKernel {
 public:
  explicit FilterBucketKernel(OpKernelConstruction* construction) : AccumulatingKernel(construction, "filter_bucket") {
    OP_REQUIRES_OK(construction, ReadRule(construction));
    OP_REQUIRES_OK(construction, GetBucketForm(construction, false, &form_));
    OP_REQUIRES_OK(construction, GetLevel(construction, &level_));
  }

 protected:
  absl::Status Run(const Call& call) const override {
    Lists lists;
    Numbers numbers;
    BucketForm form = form_;
    std::vector<PayloadFormat> formats;
    bool* finite = nullptr;
    double* info = nullptr;
    uint8_t* out = nullptr;
    TF_RETURN_IF_ERROR(OpenLists(call, &lists));
    TF_RETURN_IF_ERROR(ReadNumbers(call, lists, &numbers));
    for (const Tensor& gradient : lists.gradients) form.sizes.push_back(gradient.NumElements());
    TF_RETURN_IF_ERROR(call.Report(MemberFormats(form, &formats)));
    const int members = lists.gradients.size();
    TF_RETURN_IF_ERROR(call.Output("finite", {members}, &finite));
    TF_RETURN_IF_ERROR(call.Output("info", {members, 2}, &info));
    std::vector<uint8_t> message;
    for (int i = 0; i < members; ++i) {
      Job job;
      Filtered found;
      TF_RETURN_IF_ERROR(OpenMember(call, lists, i, numbers.factors[i], &job));
      TF_RETURN_IF_ERROR(call.Report(FilterAndPack(
          {job.gradient, job.params, job.memory, 0}, job.is_active, {numbers.thresholds[i], numbers.ks[i]},
          formats[static_cast<size_t>(i)], level_, call.Pool(), &message, finite + i, &found)));
      *info++ = found.threshold;
      *info++ = static_cast<double>(found.count);
    }
    TF_RETURN_IF_ERROR(call.Output("message", {static_cast<int64_t>(message.size())}, &out));
    std::copy(message.begin(), message.end(), out);
    return absl::OkStatus();
  }

 private:
  struct Numbers {
    const float* factors;
    const double* thresholds;
    const int64_t* ks;
  };

  static absl::Status ReadNumbers(const Call& call, const Lists& lists, Numbers* numbers) {
    int64_t factors = 0, thresholds = 0, ks = 0;
    TF_RETURN_IF_ERROR(call.Vector("factors", &numbers->factors, &factors));
    TF_RETURN_IF_ERROR(call.Vector("thresholds", &numbers->thresholds, &thresholds));
    TF_RETURN_IF_ERROR(call.Vector("ks", &numbers->ks, &ks));
    return CheckMembers(call, lists, {factors, thresholds, ks});
  }

  BucketForm form_;
  Level level_ = Level::kMean;
};

class ReduceLocatedBucketKernel : public Kernel {
 public:
  explicit ReduceLocatedBucketKernel(OpKernelConstruction* construction)
      : Kernel(construction, "reduce_located_bucket") {
    OP_REQUIRES_OK(construction, GetBucketForm(construction, false, &form_));
    OP_REQUIRES_OK(construction, GetSizes(construction, "reduce_located_bucket", &form_.sizes));
  }

 protected:
  absl::Status Run(const Call& call) const override {
    const uint8_t* gathered = nullptr;
    int64_t bytes = 0, ranks = 0;
    float scale = 0;
    std::vector<PayloadFormat> formats;
    tensorflow::OpOutputList sums;
    TF_RETURN_IF_ERROR(call.Vector("gathered", &gathered, &bytes));
    TF_RETURN_IF_ERROR(call.Number("ranks", &ranks));
    TF_RETURN_IF_ERROR(call.Number("scale", &scale));
    if (ranks < 1) return call.Invalid("ranks must be at least 1, got ", ranks);
    TF_RETURN_IF_ERROR(call.Report(MemberFormats(form_, &formats)));
    TF_RETURN_IF_ERROR(call.context()->output_list("sums", &sums));
    std::vector<float*> outs;
    for (size_t i = 0; i < form_.sizes.size(); ++i) {
      Tensor* sum = nullptr;
      TF_RETURN_IF_ERROR(sums.allocate(static_cast<int>(i), TensorShape({form_.sizes[i]}), &sum));
      outs.push_back(sum->flat<float>().data());
    }
    return call.Report(ReduceLocated(formats, ranks, gathered, bytes, scale, call.Pool(), outs));
  }

 private:
  BucketForm form_;
};

HVD_SPARSE_REGISTER(FilterBucket);
HVD_SPARSE_REGISTER(ReduceLocatedBucket);

}  // namespace
}  // namespace hvd_sparse
