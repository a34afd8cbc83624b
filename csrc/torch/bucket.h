// Checks the arguments of ops on buckets: the members in the call, and their tensors.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "../core/bucket.h"
#include "../core/bucket_layout.h"
#include "../core/partition.h"
#include "arguments.h"

namespace hvd_sparse {

using at::IntArrayRef;
using at::TensorList;

inline void CheckCounts(const char* op, const char* what, size_t count, std::initializer_list<NamedList> lists) {
  Raise(op, CheckCounts(what, count, lists));
}

// Checks the tensor of threshold hints, which selections update in each step.
inline void CheckHints(const char* op, const Tensor& hints, size_t selections) {
  TORCH_CHECK_VALUE(hints.dim() == 2 && hints.size(0) == static_cast<int64_t>(selections) && hints.size(1) == 3,
                    "hvd_sparse.", op, ": hints must be [", selections, ", 3], got ", hints.sizes());
}

inline BucketForm ParseForm(const char* op, IntArrayRef sizes, IntArrayRef channels, bool joint,
                            const std::string& coding, const std::string& value_dtype) {
  return {sizes.vec(), channels.vec(), joint, ParseFormat(op, 0, 0, coding, value_dtype, {})};
}

inline Distribution ParseDistribution(const char* op, const std::string& name) {
  return Parse(op, "distribution", kDistributionNames, name);
}

inline void CheckStages(const char* op, int64_t stages) {
  TORCH_CHECK_VALUE(stages >= 1, "hvd_sparse.", op, ": stages must be >= 1, got ", stages);
}

// Writes the fits of several tensors as rows of fit_thresholds' result, on several threads. fit(i, scratch): returns
// that of one.
template <typename FitOne>
void FitEach(size_t count, double* rows, const FitOne& fit) {
  TorchParallelFor(0, static_cast<int64_t>(count), 1, [&](int64_t begin, int64_t end) {
    static thread_local FitScratch scratch;  // kept from one step to the next
    for (int64_t i = begin; i < end; ++i) {
      const Fit found = fit(static_cast<size_t>(i), &scratch);
      rows[2 * i] = found.threshold;
      rows[2 * i + 1] = found.is_misfit ? 1 : 0;
    }
  });
}

// Returns the payload format of each member for messages whose numbers of entries vary; k is set to 1.
inline std::vector<PayloadFormat> FormatsOf(const char* op, IntArrayRef sizes, IntArrayRef channels,
                                            const std::string& coding, const std::string& value_dtype) {
  std::vector<PayloadFormat> formats;
  Raise(op, MemberFormats(ParseForm(op, sizes, channels, false, coding, value_dtype), &formats));
  return formats;
}

// The members of a bucket in one call. The tensors of the call are those of these members, in order.
class Bucket {
 public:
  Bucket(const char* op, const BucketForm& form, IntArrayRef ks, IntArrayRef members) : op_(op) {
    Raise(op, PlanBucket(form, ks.vec(), members.vec(), &layout_));
    for (const int64_t member : members) sizes_.push_back(form.sizes[static_cast<size_t>(member)]);
  }

  const std::vector<SelectionLayout>& selections() const { return layout_.selections; }
  size_t members() const { return sizes_.size(); }
  int64_t size(size_t i) const { return sizes_[i]; }

  // Checks that a tensor has as many elements as member i of the call.
  void CheckSize(const char* name, const Tensor& tensor, size_t i) const {
    TORCH_CHECK_VALUE(tensor.numel() == sizes_[i], "hvd_sparse.", op_, ": ", name, " ", i, " must have ", sizes_[i],
                      " elements, got ", tensor.numel());
  }

  // Checks the size of one rank's message.
  void CheckBytes(const char* name, int64_t bytes) const {
    TORCH_CHECK_VALUE(bytes == layout_.bytes, "hvd_sparse.", op_, ": ", name, " must have ", layout_.bytes,
                      " bytes a rank, got ", bytes);
  }

 private:
  const char* op_;
  BucketLayout layout_;
  std::vector<int64_t> sizes_;
};

inline std::optional<Tensor> MemberOf(TensorList list, size_t i) {
  return list.empty() ? std::optional<Tensor>() : std::optional<Tensor>(list[i]);
}

// The inputs of an accumulation: one tensor for each member in the call, or an empty list, and the rule.
struct BucketInputs {
  TensorList gradients, residuals, velocities, parameters;
  at::ArrayRef<double> factors;
  double momentum;
  bool nesterov;
  at::ArrayRef<double> weight_decays;

  void Check(const char* op, size_t members) const {
    CheckCounts(op, "member", members,
                {{"gradients", gradients.size()},
                 {"residuals", residuals.size()},
                 {"factors", factors.size()},
                 {"weight_decay", weight_decays.size()},
                 Optional("velocities", velocities.size(), members),
                 Optional("parameters", parameters.size(), members)});
  }

  // Returns the part of member i. `flat` stores contiguous copies of gradients that are not contiguous.
  Part PartOf(const char* op, size_t i, int64_t begin, at::Device device, std::vector<Tensor>* flat) const {
    flat->push_back(gradients[i].contiguous());
    CheckDevice(op, "gradient", flat->back(), device);
    Tensor residual = residuals[i];
    std::optional<Tensor> velocity = MemberOf(velocities, i);
    const Accumulation a = AsAccumulation(op, flat->back(), residual, velocity, MemberOf(parameters, i), factors[i],
                                          momentum, nesterov, weight_decays[i]);
    return {a.gradient, a.params, a.feedback, begin};
  }
};

// Returns tensors that form one vector, in which they begin at `begins`.
inline std::vector<Part> VectorParts(const char* op, TensorList gradients, TensorList residuals,
                                     at::ArrayRef<double> factors, IntArrayRef begins, at::Device device,
                                     std::vector<Tensor>* flat) {
  const std::vector<double> decays(gradients.size(), 0.0);
  BucketInputs in{};  // without velocities and parameters
  in.gradients = gradients;
  in.residuals = residuals;
  in.factors = factors;
  in.weight_decays = decays;
  in.Check(op, gradients.size());
  CheckCounts(op, "member", gradients.size(), {{"begins", begins.size()}});
  std::vector<Part> parts;
  for (size_t i = 0; i < gradients.size(); ++i) parts.push_back(in.PartOf(op, i, begins[i], device, flat));
  return parts;
}

// Returns a sketch as accumulate_partition does: its first bin, then the bins.
inline Tensor SketchTensor(const Partitioned& found) {
  Tensor sketch = at::empty({1 + kSketchBins}, at::kFloat);
  auto* row = sketch.mutable_data_ptr<float>();
  row[0] = static_cast<float>(found.base);
  std::copy(found.sketch.begin(), found.sketch.end(), row + 1);
  return sketch;
}

inline std::vector<Part> PartsOf(const char* op, const Bucket& bucket, const SelectionLayout& selection,
                                 const BucketInputs& in, at::Device device, std::vector<Tensor>* flat) {
  std::vector<Part> parts;
  for (size_t i = selection.first; i < selection.last; ++i) {
    bucket.CheckSize("gradient", in.gradients[i], i);
    parts.push_back(in.PartOf(op, i, selection.begins[parts.size()], device, flat));
  }
  return parts;
}

// Returns the error feedback from which a selection's payload is removed.
inline std::vector<FeedbackSlice> FeedbackOf(const char* op, const Bucket& bucket, const SelectionLayout& selection,
                                             TensorList residuals, TensorList velocities, at::Device device) {
  std::vector<FeedbackSlice> slices;
  for (size_t i = selection.first; i < selection.last; ++i) {
    Tensor residual = residuals[i];
    std::optional<Tensor> velocity = MemberOf(velocities, i);
    const int64_t size = bucket.size(i);
    slices.push_back({selection.begins[slices.size()],
                      size,
                      {FeedbackData(op, "residual", residual, size, device),
                       velocity ? FeedbackData(op, "velocity", *velocity, size, device) : nullptr}});
  }
  return slices;
}

}  // namespace hvd_sparse
