// CPU kernels that process, in one call, a bucket of variables whose numbers of entries vary from step to step.
#include <string>
#include <utility>
#include <vector>

#include "../core/bucket.h"
#include "../core/finite.h"
#include "../core/partition.h"
#include "../core/reduce.h"
#include "feedback.h"

namespace hvd_sparse {
namespace {

class FilterBucketKernel : public AccumulatingKernel {
 public:
  explicit FilterBucketKernel(OpKernelConstruction* construction) : AccumulatingKernel(construction, "filter_bucket") {
    OP_REQUIRES_OK(construction, ReadRule(construction));
    OP_REQUIRES_OK(construction, GetBucketForm(construction, false, &form_));
    OP_REQUIRES_OK(construction, GetNamed(construction, "level", kLevelNames, &level_));
    OP_REQUIRES_OK(construction, GetNamed(construction, "distribution", kDistributionNames, &distribution_));
  }

 protected:
  absl::Status Run(const Call& call) const override {
    Lists lists;
    Numbers numbers{};
    BucketForm form = form_;
    std::vector<PayloadFormat> formats;
    bool* finite = nullptr;
    double* info = nullptr;
    uint8_t* out = nullptr;
    TF_RETURN_IF_ERROR(OpenLists(call, &lists));
    TF_RETURN_IF_ERROR(ReadNumbers(call, lists, &numbers));
    for (const Tensor& gradient : lists.gradients) form.sizes.push_back(gradient.NumElements());
    TF_RETURN_IF_ERROR(call.Report(MemberFormats(form, &formats)));
    const size_t members = formats.size();
    TF_RETURN_IF_ERROR(call.Output("finite", {static_cast<int64_t>(members)}, &finite));
    TF_RETURN_IF_ERROR(call.Output("info", {static_cast<int64_t>(members), 2}, &info));
    std::vector<Job> jobs(members);  // these lock the variables
    std::vector<Part> parts;
    std::vector<FilterParams> filters(members);
    for (size_t i = 0; i < members; ++i) {  // all members are checked before one changes
      TF_RETURN_IF_ERROR(OpenMember(call, lists, static_cast<int>(i), numbers.factors[i], &jobs[i]));
      parts.push_back({jobs[i].gradient, jobs[i].params, jobs[i].feedback, 0});
      const FitParams fit{numbers.stages[i], distribution_, numbers.seed};
      filters[i] = MakeFilter(numbers.thresholds[i], numbers.ks[i], fit);
      TF_RETURN_IF_ERROR(call.Report(CheckFilter(parts[i], filters[i], formats[i])));
    }
    std::vector<uint8_t> message;
    for (size_t i = 0; i < members; ++i) {
      Filtered found;
      TF_RETURN_IF_ERROR(call.Report(FilterAndPack(parts[i], lists.is_active, filters[i], formats[i], level_,
                                                   call.Pool(), &message, finite + i, &found)));
      info[2 * i] = found.threshold;
      info[2 * i + 1] = static_cast<double>(found.count);
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
    const int64_t* stages;
    uint64_t seed;
  };

  static absl::Status ReadNumbers(const Call& call, const Lists& lists, Numbers* numbers) {
    int64_t factors = 0, thresholds = 0, ks = 0, stages = 0;
    TF_RETURN_IF_ERROR(call.Vector("factors", &numbers->factors, &factors));
    TF_RETURN_IF_ERROR(call.Vector("thresholds", &numbers->thresholds, &thresholds));
    TF_RETURN_IF_ERROR(call.Vector("ks", &numbers->ks, &ks));
    TF_RETURN_IF_ERROR(call.Vector("stages", &numbers->stages, &stages));
    TF_RETURN_IF_ERROR(call.Seed(&numbers->seed));
    return CheckMembers(call, lists,
                        {{"factors", factors}, {"thresholds", thresholds}, {"ks", ks}, {"stages", stages}});
  }

  BucketForm form_;
  Level level_ = Level::kMean;
  Distribution distribution_ = Distribution::kExponential;
};

class AccumulatePartitionKernel : public AccumulatingKernel {
 public:
  explicit AccumulatePartitionKernel(OpKernelConstruction* construction)
      : AccumulatingKernel(construction, "accumulate_partition") {
    OP_REQUIRES_OK(construction, ReadRule(construction));
  }

 protected:
  absl::Status Run(const Call& call) const override {
    Lists lists;
    const float* factors = nullptr;
    int64_t count = 0;
    bool* finite = nullptr;
    PartitionParams params;
    TF_RETURN_IF_ERROR(OpenLists(call, &lists));
    TF_RETURN_IF_ERROR(call.Vector("factors", &factors, &count));
    TF_RETURN_IF_ERROR(CheckMembers(call, lists, {{"factors", count}}));
    TF_RETURN_IF_ERROR(call.Number("begin", &params.begin));
    TF_RETURN_IF_ERROR(call.Number("end", &params.end));
    TF_RETURN_IF_ERROR(call.Number("threshold", &params.threshold));
    TF_RETURN_IF_ERROR(call.Number("share", &params.share));
    TF_RETURN_IF_ERROR(call.Number("sample", &params.sample));
    TF_RETURN_IF_ERROR(call.Seed(&params.seed));
    TF_RETURN_IF_ERROR(call.Output("finite", {count}, &finite));
    std::vector<Job> jobs(static_cast<size_t>(count));  // these lock the variables
    std::vector<Part> parts;
    int64_t begin = 0;
    for (int i = 0; i < count; ++i) {
      Job& job = jobs[static_cast<size_t>(i)];
      TF_RETURN_IF_ERROR(OpenMember(call, lists, i, factors[i], &job));
      parts.push_back({job.gradient, job.params, job.feedback, begin});
      begin += job.gradient.size;
    }
    Partitioned found;
    if (lists.is_active) {
      TF_RETURN_IF_ERROR(call.Report(AccumulatePartition(parts, params, call.Pool(), finite, &found)));
    } else {
      for (size_t i = 0; i < parts.size(); ++i) finite[i] = AllFinite(parts[i].gradient, call.Pool());
    }
    return Give(call, found);
  }

 private:
  static absl::Status Give(const Call& call, const Partitioned& found) {
    int64_t* indices = nullptr;
    float* sketch = nullptr;
    TF_RETURN_IF_ERROR(call.Output("indices", {static_cast<int64_t>(found.indices.size())}, &indices));
    TF_RETURN_IF_ERROR(call.Output("sketch", {1 + kSketchBins}, &sketch));
    std::copy(found.indices.begin(), found.indices.end(), indices);
    sketch[0] = static_cast<float>(found.base);
    std::copy(found.sketch.begin(), found.sketch.end(), sketch + 1);
    return absl::OkStatus();
  }
};

class ReduceLocatedBucketKernel : public Kernel {
 public:
  explicit ReduceLocatedBucketKernel(OpKernelConstruction* construction)
      : Kernel(construction, "reduce_located_bucket") {
    OP_REQUIRES_OK(construction, GetBucketForm(construction, false, &form_));
    OP_REQUIRES_OK(construction, GetSizes(construction, "reduce_located_bucket", &form_.sizes));
    OP_REQUIRES(construction, construction->num_outputs() == static_cast<int>(form_.sizes.size()),
                absl::InvalidArgumentError("hvd_sparse.reduce_located_bucket: M must be the number of ns"));
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
HVD_SPARSE_REGISTER(AccumulatePartition);
HVD_SPARSE_REGISTER(ReduceLocatedBucket);

}  // namespace
}  // namespace hvd_sparse
