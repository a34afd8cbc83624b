// Base classes of the kernels that process a bucket of variables in one call. Inputs, outputs and their layout are the
// same on every device; derived classes do the computation.
#pragma once

#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../core/bucket.h"
#include "../core/reduce.h"
#include "feedback.h"

namespace hvd_sparse {

// Plans the message of members with these sizes. The call provides the k of each selection.
inline absl::Status PlanMessage(const Call& call, BucketForm form, const std::vector<int64_t>& sizes,
                                BucketLayout* layout) {
  const int64_t* ks = nullptr;
  int64_t count = 0;
  TF_RETURN_IF_ERROR(call.Vector("ks", &ks, &count));
  std::vector<int64_t> members(sizes.size());
  std::iota(members.begin(), members.end(), 0);
  form.sizes = sizes;
  return call.Report(PlanBucket(form, {ks, ks + count}, members, layout));
}

class AccumulateBucketBase : public AccumulatingKernel {
 public:
  explicit AccumulateBucketBase(OpKernelConstruction* construction, CopyBytes copy = CopyOnHost)
      : AccumulatingKernel(construction, "accumulate_bucket", copy) {
    OP_REQUIRES_OK(construction, ReadRule(construction));
    OP_REQUIRES_OK(construction, GetBucketForm(construction, true, &form_));
    OP_REQUIRES_OK(construction, GetNamed(construction, "level", kLevelNames, &level_));
  }

 protected:
  // One selection: the arguments of accumulate_bucket in the core or on a device.
  struct Filling {
    PayloadFormat format;
    std::vector<Part> parts;
    SelectParams select;
    uint8_t* payload;
  };

  // Fills the payloads. info: two numbers for each selection; finite: one for each part.
  virtual absl::Status Fill(const Call& call, const std::vector<Filling>& fillings, bool active, Level level,
                            double* info, bool* finite) const = 0;

  absl::Status Run(const Call& call) const final {
    Lists lists;
    std::vector<int64_t> sizes;
    BucketLayout layout;
    Numbers numbers;
    uint8_t* message = nullptr;
    bool* finite = nullptr;
    double* info = nullptr;
    TF_RETURN_IF_ERROR(OpenLists(call, &lists));
    for (const Tensor& gradient : lists.gradients) sizes.push_back(gradient.NumElements());
    TF_RETURN_IF_ERROR(PlanMessage(call, form_, sizes, &layout));
    TF_RETURN_IF_ERROR(ReadNumbers(call, lists, layout.selections.size(), &numbers));
    TF_RETURN_IF_ERROR(call.Output("message", {layout.bytes}, &message));
    TF_RETURN_IF_ERROR(call.Output("finite", {lists.gradients.size()}, &finite));
    TF_RETURN_IF_ERROR(call.Output("info", {static_cast<int64_t>(layout.selections.size()), 2}, &info));
    std::vector<Job> jobs(sizes.size());  // these lock the variables
    std::vector<Filling> fillings;
    for (const SelectionLayout& selection : layout.selections) {
      TF_RETURN_IF_ERROR(Open(call, lists, selection, numbers, message, &jobs, &fillings));
    }
    return Fill(call, fillings, lists.is_active, level_, info, finite);
  }

 private:
  struct Numbers {
    const float* factors;
    const double* hints;
    uint64_t seed;
  };

  static absl::Status ReadNumbers(const Call& call, const Lists& lists, size_t selections, Numbers* numbers) {
    int64_t factors = 0, hints = 0;
    TF_RETURN_IF_ERROR(call.Vector("factors", &numbers->factors, &factors));
    TF_RETURN_IF_ERROR(call.Vector("threshold_hints", &numbers->hints, &hints));
    TF_RETURN_IF_ERROR(call.Seed(&numbers->seed));
    TF_RETURN_IF_ERROR(call.Report(CheckCounts("selection", selections, {{"threshold_hints", hints}})));
    return CheckMembers(call, lists, {{"factors", factors}});
  }

  absl::Status Open(const Call& call, const Lists& lists, const SelectionLayout& selection, const Numbers& numbers,
                    uint8_t* message, std::vector<Job>* jobs, std::vector<Filling>* fillings) const {
    const double hint = numbers.hints[fillings->size()];
    Filling filling{selection.format, {}, {selection.format.k, hint, numbers.seed}, message + selection.offset};
    for (size_t member = selection.first; member < selection.last; ++member) {
      Job& job = (*jobs)[member];
      TF_RETURN_IF_ERROR(OpenMember(call, lists, static_cast<int>(member), numbers.factors[member], &job));
      filling.parts.push_back({job.gradient, job.params, job.feedback, selection.begins[filling.parts.size()]});
    }
    fillings->push_back(std::move(filling));
    return absl::OkStatus();
  }

  BucketForm form_;
  Level level_ = Level::kMean;
};

class ClearBucketBase : public Kernel {
 public:
  explicit ClearBucketBase(OpKernelConstruction* construction, CopyBytes copy = CopyOnHost)
      : Kernel(construction, "clear_bucket", copy) {
    OP_REQUIRES_OK(construction, GetBucketForm(construction, true, &form_));
    OP_REQUIRES_OK(construction, construction->GetAttr("retained", &retained_));
  }

 protected:
  // A payload, and the error feedback from which it is removed.
  struct Clearing {
    PayloadFormat format;
    const uint8_t* payload;
    std::vector<FeedbackSlice> slices;
  };

  virtual absl::Status Clear(const Call& call, const std::vector<Clearing>& clearings) const = 0;

  float retained_ = 0;  // fraction of the sent values that stays in the residual

  absl::Status Run(const Call& call) const final {
    bool is_skipped = false;
    TF_RETURN_IF_ERROR(call.Number("is_skipped", &is_skipped));
    if (is_skipped) return absl::OkStatus();
    tensorflow::OpInputList residuals, velocities;
    const uint8_t* message = nullptr;
    int64_t bytes = 0;
    TF_RETURN_IF_ERROR(call.context()->input_list("residual", &residuals));
    TF_RETURN_IF_ERROR(call.context()->input_list("velocity", &velocities));
    TF_RETURN_IF_ERROR(call.Vector("message", &message, &bytes));
    if (velocities.size() != 0 && velocities.size() != residuals.size()) {
      return call.Invalid(velocities.size(), " velocities but ", residuals.size(), " residuals");
    }
    std::vector<Buffer> buffers(static_cast<size_t>(residuals.size() + velocities.size()));
    std::vector<int64_t> sizes;
    for (int i = 0; i < residuals.size(); ++i) {
      Buffer& residual = buffers[static_cast<size_t>(i)];
      TF_RETURN_IF_ERROR(residual.Open(call, residuals[i]));
      sizes.push_back(residual.size());
    }
    for (int i = 0; i < velocities.size(); ++i) {
      Buffer& velocity = buffers[sizes.size() + static_cast<size_t>(i)];
      TF_RETURN_IF_ERROR(velocity.Open(call, velocities[i]));
      if (velocity.size() != sizes[static_cast<size_t>(i)]) return call.Invalid("velocity and residual differ in size");
    }
    BucketLayout layout;
    TF_RETURN_IF_ERROR(PlanMessage(call, form_, sizes, &layout));
    if (layout.bytes != bytes) return call.Invalid("message must have ", layout.bytes, " bytes, got ", bytes);
    return Clear(call, ClearingsOf(layout, sizes, buffers, message));
  }

 private:
  static std::vector<Clearing> ClearingsOf(const BucketLayout& layout, const std::vector<int64_t>& sizes,
                                           const std::vector<Buffer>& buffers, const uint8_t* message) {
    std::vector<Clearing> clearings;
    for (const SelectionLayout& selection : layout.selections) {
      Clearing clearing{selection.format, message + selection.offset, {}};
      for (size_t i = selection.first; i < selection.last; ++i) {
        float* velocity = buffers.size() == sizes.size() ? nullptr : buffers[sizes.size() + i].data();
        clearing.slices.push_back({selection.begins[clearing.slices.size()], sizes[i], {buffers[i].data(), velocity}});
      }
      clearings.push_back(std::move(clearing));
    }
    return clearings;
  }

  BucketForm form_;
};

class ReduceBucketBase : public Kernel {
 public:
  explicit ReduceBucketBase(OpKernelConstruction* construction) : Kernel(construction, "reduce_bucket") {
    OP_REQUIRES_OK(construction, GetBucketForm(construction, true, &form_));
    OP_REQUIRES_OK(construction, GetSizes(construction, "reduce_bucket", &form_.sizes));
    OP_REQUIRES(construction, construction->num_outputs() == static_cast<int>(form_.sizes.size()),
                absl::InvalidArgumentError("hvd_sparse.reduce_bucket: M must be the number of ns"));
  }

 protected:
  // The first rank's payload, and the destination of the sum.
  struct Summing {
    PayloadFormat format;
    const uint8_t* first;
    std::vector<Slice> slices;
  };

  // Sums the payloads of all ranks. Those of a selection are `stride` bytes apart.
  virtual absl::Status Reduce(const Call& call, const std::vector<Summing>& summings, int64_t ranks, int64_t stride,
                              float scale) const = 0;

  absl::Status Run(const Call& call) const final {
    const uint8_t* gathered = nullptr;
    int64_t bytes = 0, ranks = 0;
    float scale = 0;
    BucketLayout layout;
    tensorflow::OpOutputList sums;
    TF_RETURN_IF_ERROR(call.Vector("gathered", &gathered, &bytes));
    TF_RETURN_IF_ERROR(call.Number("ranks", &ranks));
    TF_RETURN_IF_ERROR(call.Number("scale", &scale));
    TF_RETURN_IF_ERROR(PlanMessage(call, form_, form_.sizes, &layout));
    TF_RETURN_IF_ERROR(call.Report(CheckRanks(ranks)));
    if (bytes % ranks != 0 || bytes / ranks != layout.bytes) {
      return call.Invalid("gathered must be a message of ", layout.bytes, " bytes of each of ", ranks, " ranks, got ",
                          bytes, " bytes");
    }
    TF_RETURN_IF_ERROR(call.context()->output_list("sums", &sums));
    std::vector<Summing> summings;
    for (const SelectionLayout& selection : layout.selections) {
      Summing summing{selection.format, gathered + selection.offset, {}};
      for (size_t i = selection.first; i < selection.last; ++i) {
        const int64_t n = form_.sizes[i];
        Tensor* sum = nullptr;
        TF_RETURN_IF_ERROR(sums.allocate(static_cast<int>(i), TensorShape({n}), &sum));
        summing.slices.push_back({selection.begins[summing.slices.size()], n, sum->flat<float>().data()});
      }
      summings.push_back(std::move(summing));
    }
    return Reduce(call, summings, ranks, layout.bytes, scale);
  }

 private:
  BucketForm form_;
};

// Checks the all-reduced token, then returns the sum in the gradient's shape, without a copy.
class TakeSumBase : public Kernel {
 public:
  explicit TakeSumBase(OpKernelConstruction* construction) : Kernel(construction, "take_sum") {
    tensorflow::PartialTensorShape shape;
    OP_REQUIRES_OK(construction, GetKnownShape(construction, "take_sum", &shape));
    shape.AsTensorShape(&shape_);
  }

 protected:
  // Sets n elements to NaN.
  virtual absl::Status Spoil(const Call& call, float* out, int64_t n) const = 0;

  absl::Status Run(const Call& call) const final {
    const float* token = nullptr;
    int64_t size = 0;
    float expected = 0;
    bool is_skipped = false;
    TF_RETURN_IF_ERROR(call.Vector("token", &token, &size));
    TF_RETURN_IF_ERROR(call.Number("expected", &expected));
    TF_RETURN_IF_ERROR(call.Number("is_skipped", &is_skipped));
    if (size < 1 || !(std::abs(token[0] - expected) <= 1e-3f * expected)) {
      return call.Invalid("Horovod's reduction turned a token of 1 into another value than its op says: ",
                          size < 1 ? 0.0f : token[0], " in place of ", expected);
    }
    const Tensor& sum = call.context()->input(0);
    if (sum.NumElements() != shape_.num_elements()) {
      return call.Invalid("a sum of ", sum.NumElements(), " elements does not fit shape ", shape_.DebugString());
    }
    if (is_skipped) {
      float* out = nullptr;
      TF_RETURN_IF_ERROR(call.Output("gradient", shape_, &out));
      return Spoil(call, out, shape_.num_elements());
    }
    Tensor shaped;
    if (!shaped.CopyFrom(sum, shape_)) return call.Invalid("the sum cannot be reshaped");
    call.context()->set_output(0, shaped);
    return absl::OkStatus();
  }

 private:
  TensorShape shape_;
};

}  // namespace hvd_sparse
