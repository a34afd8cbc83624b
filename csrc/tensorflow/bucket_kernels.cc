// CPU kernels that work on a bucket of variables in one call: an op costs more than a small variable's selection.
#include <cmath>
#include <limits>

#include "../core/bucket.h"
#include "../core/reduce.h"
#include "memory.h"

namespace hvd_sparse {
namespace {

// Members [first, last) of a bucket that share a selection, and its payload in the message.
struct Selected {
  int first;
  int last;
  PayloadFormat format;
  std::vector<int64_t> begins;  // of each member's elements in the selection
  int64_t offset;               // in bytes
};

// How a bucket is laid out: what the op's attributes say, and k of the call.
class BucketLayout {
 public:
  absl::Status Read(OpKernelConstruction* construction) {
    TF_RETURN_IF_ERROR(GetFormat(construction, &shared_));
    TF_RETURN_IF_ERROR(construction->GetAttr("columns", &columns_));
    return construction->GetAttr("joint", &joint_);
  }

  // `sizes`: n of each member. One entry of ks a selection: all members share one if joint, else each has its own.
  absl::Status Plan(const Call& call, const std::vector<int64_t>& sizes, std::vector<Selected>* selections,
                    int64_t* message_size) const {
    const int64_t* ks = nullptr;
    int64_t count = 0;
    TF_RETURN_IF_ERROR(call.Vector("ks", &ks, &count));
    const size_t expected = joint_ ? 1 : sizes.size();
    if (static_cast<size_t>(count) != expected) {
      return call.Invalid("ks must have one entry a selection, ", expected, ", got ", count);
    }
    if (!columns_.empty() && columns_.size() != sizes.size()) {
      return call.Invalid("columns must have one entry a member, ", sizes.size(), ", got ", columns_.size());
    }
    *message_size = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (i == 0 || !joint_) {
        selections->push_back({static_cast<int>(i), 0, shared_, {}, 0});
        selections->back().format.n = 0;
        selections->back().format.k = ks[selections->size() - 1];
      }
      Selected& selection = selections->back();
      selection.last = static_cast<int>(i) + 1;
      if (!columns_.empty()) selection.format.segments.push_back({selection.format.n, columns_[i]});
      selection.begins.push_back(selection.format.n);
      selection.format.n += sizes[i];
    }
    for (Selected& selection : *selections) {
      int64_t size = 0;
      TF_RETURN_IF_ERROR(call.Report(PayloadSize(selection.format, &size)));
      selection.offset = *message_size;
      *message_size += size;
    }
    return absl::OkStatus();
  }

 private:
  PayloadFormat shared_;
  std::vector<int64_t> columns_;
  bool joint_ = false;
};

class AccumulateBucketKernel : public AccumulatingKernel {
 public:
  explicit AccumulateBucketKernel(OpKernelConstruction* construction)
      : AccumulatingKernel(construction, "accumulate_bucket") {
    std::string centre;
    OP_REQUIRES_OK(construction, ReadRule(construction));
    OP_REQUIRES_OK(construction, layout_.Read(construction));
    OP_REQUIRES_OK(construction, construction->GetAttr("centre", &centre));
    centre_ = centre == "min" ? Centre::kMin : Centre::kMean;
  }

 protected:
  absl::Status Run(const Call& call) const override {
    Lists lists;
    std::vector<int64_t> sizes;
    std::vector<Selected> selections;
    Numbers numbers;
    int64_t size = 0;
    uint8_t* message = nullptr;
    bool* finite = nullptr;
    double* info = nullptr;
    TF_RETURN_IF_ERROR(OpenLists(call, &lists));
    for (const Tensor& gradient : lists.gradients) sizes.push_back(gradient.NumElements());
    TF_RETURN_IF_ERROR(layout_.Plan(call, sizes, &selections, &size));
    TF_RETURN_IF_ERROR(ReadNumbers(call, lists, selections.size(), &numbers));
    TF_RETURN_IF_ERROR(call.Output("message", {size}, &message));
    TF_RETURN_IF_ERROR(call.Output("finite", {lists.gradients.size()}, &finite));
    TF_RETURN_IF_ERROR(call.Output("info", {static_cast<int64_t>(selections.size()), 2}, &info));
    for (const Selected& selection : selections) {
      Selection found;
      TF_RETURN_IF_ERROR(Fill(call, lists, selection, numbers, message + selection.offset, finite, &found));
      ++numbers.hints;
      *info++ = found.threshold;
      *info++ = static_cast<double>(found.passed);
    }
    return absl::OkStatus();
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
    const int members = lists.gradients.size();
    const auto may_lack = [members](int count) { return count == 0 || count == members; };
    if (hints != static_cast<int64_t>(selections)) {
      return call.Invalid("threshold_hints must have one entry a selection, ", selections, ", got ", hints);
    }
    if (factors == members && lists.residuals.size() == members && may_lack(lists.velocities.size()) &&
        may_lack(lists.parameters.size())) {
      return absl::OkStatus();
    }
    return call.Invalid("every list must have ", members, " entries, one a member");
  }

  absl::Status Fill(const Call& call, const Lists& lists, const Selected& selection, const Numbers& numbers,
                    uint8_t* payload, bool* finite, Selection* found) const {
    std::vector<Job> jobs(static_cast<size_t>(selection.last - selection.first));
    std::vector<Part> parts;
    for (size_t i = 0; i < jobs.size(); ++i) {
      const int member = selection.first + static_cast<int>(i);
      TF_RETURN_IF_ERROR(OpenMember(call, lists, member, numbers.factors[member], &jobs[i]));
      parts.push_back({jobs[i].gradient, jobs[i].params, jobs[i].memory, selection.begins[i]});
    }
    const SelectParams select{selection.format.k, *numbers.hints, numbers.seed};
    return call.Report(AccumulateAndPack(parts, lists.is_active, select, selection.format, centre_, call.Pool(),
                                         payload, finite + selection.first, found));
  }

  BucketLayout layout_;
  Centre centre_ = Centre::kMean;
};

class ClearBucketKernel : public Kernel {
 public:
  explicit ClearBucketKernel(OpKernelConstruction* construction) : Kernel(construction, "clear_bucket") {
    OP_REQUIRES_OK(construction, layout_.Read(construction));
    OP_REQUIRES_OK(construction, construction->GetAttr("kept", &kept_));
  }

 protected:
  absl::Status Run(const Call& call) const override {
    bool is_void = false;
    TF_RETURN_IF_ERROR(call.Number("is_void", &is_void));
    if (is_void) return absl::OkStatus();
    tensorflow::OpInputList residuals, velocities;
    const uint8_t* message = nullptr;
    int64_t bytes = 0, size = 0;
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
      TF_RETURN_IF_ERROR(residual.Open(call, HandleOf(residuals[i])));
      sizes.push_back(residual.size());
    }
    for (int i = 0; i < velocities.size(); ++i) {
      Buffer& velocity = buffers[sizes.size() + static_cast<size_t>(i)];
      TF_RETURN_IF_ERROR(velocity.Open(call, HandleOf(velocities[i])));
      if (velocity.size() != sizes[static_cast<size_t>(i)]) return call.Invalid("velocity and residual differ in size");
    }
    std::vector<Selected> selections;
    TF_RETURN_IF_ERROR(layout_.Plan(call, sizes, &selections, &size));
    if (size != bytes) return call.Invalid("the message must have ", size, " bytes, got ", bytes);
    for (const Selected& selection : selections) {
      std::vector<MemorySlice> slices;
      for (auto i = static_cast<size_t>(selection.first); i < static_cast<size_t>(selection.last); ++i) {
        float* velocity = velocities.size() == 0 ? nullptr : buffers[sizes.size() + i].data();
        const int64_t begin = selection.begins[i - static_cast<size_t>(selection.first)];
        slices.push_back({begin, sizes[i], {buffers[i].data(), velocity}});
      }
      TF_RETURN_IF_ERROR(call.Report(ClearSent(selection.format, message + selection.offset, slices, kept_)));
    }
    return absl::OkStatus();
  }

 private:
  BucketLayout layout_;
  float kept_ = 0;
};

class ReduceBucketKernel : public Kernel {
 public:
  explicit ReduceBucketKernel(OpKernelConstruction* construction) : Kernel(construction, "reduce_bucket") {
    OP_REQUIRES_OK(construction, layout_.Read(construction));
    OP_REQUIRES_OK(construction, construction->GetAttr("ns", &ns_));
    for (const int64_t n : ns_) {
      OP_REQUIRES(construction, n >= 0, absl::InvalidArgumentError("hvd_sparse.reduce_bucket: ns must be >= 0"));
    }
  }

 protected:
  absl::Status Run(const Call& call) const override {
    const uint8_t* gathered = nullptr;
    int64_t bytes = 0, ranks = 0, size = 0;
    float scale = 0;
    std::vector<Selected> selections;
    tensorflow::OpOutputList sums;
    TF_RETURN_IF_ERROR(call.Vector("gathered", &gathered, &bytes));
    TF_RETURN_IF_ERROR(call.Number("ranks", &ranks));
    TF_RETURN_IF_ERROR(call.Number("scale", &scale));
    TF_RETURN_IF_ERROR(layout_.Plan(call, ns_, &selections, &size));
    if (ranks < 1 || bytes != ranks * size) {
      return call.Invalid("gathered must be a message of ", size, " bytes of each of ", ranks, " ranks, got ", bytes,
                          " bytes");
    }
    TF_RETURN_IF_ERROR(call.context()->output_list("sums", &sums));
    for (const Selected& selection : selections) {
      std::vector<Slice> slices;
      for (int i = selection.first; i < selection.last; ++i) {
        const int64_t n = ns_[static_cast<size_t>(i)];
        Tensor* sum = nullptr;
        TF_RETURN_IF_ERROR(sums.allocate(i, TensorShape({n}), &sum));
        slices.push_back({selection.begins[slices.size()], n, sum->flat<float>().data()});
      }
      TF_RETURN_IF_ERROR(call.Report(
          ReducePayloads(selection.format, gathered + selection.offset, ranks, size, scale, call.Pool(), slices)));
    }
    return absl::OkStatus();
  }

 private:
  BucketLayout layout_;
  std::vector<int64_t> ns_;
};

// What Horovod made of a token must be what its op says; then the sum, in the gradient's shape, is handed on as it is.
class TakeSumKernel : public Kernel {
 public:
  explicit TakeSumKernel(OpKernelConstruction* construction) : Kernel(construction, "take_sum") {
    OP_REQUIRES_OK(construction, construction->GetAttr("shape", &shape_));
  }

 protected:
  absl::Status Run(const Call& call) const override {
    const float* token = nullptr;
    int64_t size = 0;
    float expected = 0;
    bool is_void = false;
    TF_RETURN_IF_ERROR(call.Vector("token", &token, &size));
    TF_RETURN_IF_ERROR(call.Number("expected", &expected));
    TF_RETURN_IF_ERROR(call.Number("is_void", &is_void));
    if (size < 1 || !(std::abs(token[0] - expected) <= 1e-3f * expected)) {
      return call.Invalid("Horovod's reduction turned a token of 1 into another value than its op says: ",
                          size < 1 ? 0.0f : token[0], " in place of ", expected);
    }
    const Tensor& sum = call.context()->input(0);
    if (sum.NumElements() != shape_.num_elements()) {
      return call.Invalid("a sum of ", sum.NumElements(), " elements does not fit shape ", shape_.DebugString());
    }
    if (is_void) {
      float* out = nullptr;
      TF_RETURN_IF_ERROR(call.Output("gradient", shape_, &out));
      std::fill_n(out, shape_.num_elements(), std::numeric_limits<float>::quiet_NaN());
      return absl::OkStatus();
    }
    Tensor shaped;
    if (!shaped.CopyFrom(sum, shape_)) return call.Invalid("the sum cannot be reshaped");
    call.context()->set_output(0, shaped);
    return absl::OkStatus();
  }

 private:
  TensorShape shape_;
};

HVD_SPARSE_REGISTER(AccumulateBucket);
HVD_SPARSE_REGISTER(ClearBucket);
HVD_SPARSE_REGISTER(ReduceBucket);
HVD_SPARSE_REGISTER(TakeSum);

}  // namespace
}  // namespace hvd_sparse
