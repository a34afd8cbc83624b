// A bucket of CUDA tensors in one call. Nothing here waits for the device.
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "../cuda/bucket.h"
#include "bucket_layout.h"
#include "cuda_arguments.h"

namespace hvd_sparse {
namespace {

// What comes in, one a member, and how it changes the memory.
struct BucketInputs {
  TensorList gradients, residuals, velocities, parameters;
  at::ArrayRef<double> factors;
  double momentum;
  bool nesterov;
  at::ArrayRef<double> weight_decays;
};

void CheckLists(const CudaCall& call, const BucketInputs& in, IntArrayRef selections, const Tensor& out,
                const std::string& value_dtype) {
  const size_t members = in.gradients.size();
  CheckCounts(
      call.op(), "member", members,
      {in.residuals.size(), in.factors.size(), in.weight_decays.size(), selections.size(),
       in.velocities.empty() ? members : in.velocities.size(), in.parameters.empty() ? members : in.parameters.size()});
  call.CheckTensorHere("out", out, at::kByte);
  TORCH_CHECK_VALUE(value_dtype != "float64", "hvd_sparse.", call.op(),
                    ": residuals are float32, and so is what is sent of them; got value_dtype float64");
}

PayloadPlan PlanOf(const CudaCall& call, const PayloadFormat& format) {
  PayloadPlan plan{};
  call.Check(MakePlan(format, &plan));
  return plan;
}

// The members of a bucket as the launchers take them; `flat` keeps copies of gradients that are not contiguous.
BucketSelections SelectionsOf(const CudaCall& call, Layout* layout, const BucketInputs& in, const Tensor& out,
                              std::vector<Tensor>* flat) {
  BucketSelections result;
  for (size_t s = 0; s < layout->formats().size(); ++s) {
    const PayloadPlan plan = PlanOf(call, layout->formats()[s]);
    BucketSelection selection{plan, {}, {plan.k, 0, 0}, nullptr, layout->PayloadIn(s, out)};
    CheckAligned(call, "out", selection.payload);
    layout->ForMembers(s, in.gradients, [&](size_t i) {
      flat->push_back(in.gradients[i].contiguous());
      call.CheckTensorHere("gradient", flat->back(), flat->back().scalar_type());
      Tensor residual = in.residuals[i];
      std::optional<Tensor> velocity = MemberOf(in.velocities, i);
      const Accumulation a = AsAccumulation(call.op(), flat->back(), residual, velocity, MemberOf(in.parameters, i),
                                            in.factors[i], in.momentum, in.nesterov, in.weight_decays[i]);
      selection.parts.push_back({a.gradient, a.params, a.memory, layout->begin(i)});
    });
    result.push_back(std::move(selection));
  }
  return result;
}

// Returns threshold and how many elements reached the hint, [selections, 2], and whether each gradient was finite.
std::tuple<Tensor, Tensor> Accumulate(const CudaCall& call, const BucketSelections& selections, size_t members,
                                      Centre centre) {
  int64_t size = 0;
  call.Run(accumulate_bucket_workspace_size(selections, &size));
  const Tensor workspace = call.Bytes(size);
  Tensor info = call.Empty({static_cast<int64_t>(selections.size()), 2}, at::kDouble);
  Tensor finite = call.Empty({static_cast<int64_t>(members)}, at::kBool);
  call.Run(accumulate_bucket_launch(selections, true, centre, info.mutable_data_ptr<double>(),
                                    finite.mutable_data_ptr<bool>(), workspace.data_ptr(), call.stream()));
  return {info, finite};
}

std::tuple<Tensor, Tensor> AccumulateBucketOp(TensorList gradients, TensorList residuals, TensorList velocities,
                                              TensorList parameters, at::ArrayRef<double> factors, double momentum,
                                              bool nesterov, at::ArrayRef<double> weight_decays, IntArrayRef ns,
                                              IntArrayRef ks, int64_t seed, at::ArrayRef<double> hints, Tensor out,
                                              IntArrayRef offsets, IntArrayRef selections, IntArrayRef begins,
                                              const std::string& coding, const std::string& value_dtype,
                                              const std::string& centre, const OptionalTensors& segments) {
  const CudaCall call("accumulate_bucket", "out", out);
  const BucketInputs in{gradients, residuals, velocities, parameters, factors, momentum, nesterov, weight_decays};
  Layout layout(call.op(), ns, ks, offsets, selections, begins, coding, value_dtype, segments);
  CheckCounts(call.op(), "selection", ns.size(), {hints.size()});
  CheckLists(call, in, selections, out, value_dtype);
  std::vector<Tensor> flat;
  BucketSelections bucket = SelectionsOf(call, &layout, in, out, &flat);
  for (size_t s = 0; s < bucket.size(); ++s) bucket[s].select = {ks[s], hints[s], static_cast<uint64_t>(seed)};
  return Accumulate(call, bucket, gradients.size(), ParseCentre(call.op(), centre));
}

std::tuple<Tensor, Tensor> AccumulateBucketHintedOp(TensorList gradients, TensorList residuals, TensorList velocities,
                                                    TensorList parameters, at::ArrayRef<double> factors,
                                                    double momentum, bool nesterov, at::ArrayRef<double> weight_decays,
                                                    IntArrayRef ns, IntArrayRef ks, int64_t seed, Tensor hints,
                                                    Tensor out, IntArrayRef offsets, IntArrayRef selections,
                                                    IntArrayRef begins, const std::string& coding,
                                                    const std::string& value_dtype, const std::string& centre,
                                                    const OptionalTensors& segments) {
  const CudaCall call("accumulate_bucket_hinted", "out", out);
  const BucketInputs in{gradients, residuals, velocities, parameters, factors, momentum, nesterov, weight_decays};
  Layout layout(call.op(), ns, ks, offsets, selections, begins, coding, value_dtype, segments);
  call.CheckTensorHere("hints", hints, at::kDouble);
  CheckHints(call.op(), hints, ns.size());
  CheckLists(call, in, selections, out, value_dtype);
  std::vector<Tensor> flat;
  BucketSelections bucket = SelectionsOf(call, &layout, in, out, &flat);
  for (size_t s = 0; s < bucket.size(); ++s) {
    bucket[s].select = {ks[s], 0, static_cast<uint64_t>(seed)};
    bucket[s].hint = static_cast<Hint*>(hints.data_ptr()) + s;
  }
  return Accumulate(call, bucket, gradients.size(), ParseCentre(call.op(), centre));
}

void ClearBucketOp(const Tensor& message, TensorList residuals, TensorList velocities, IntArrayRef ns, IntArrayRef ks,
                   IntArrayRef offsets, IntArrayRef selections, IntArrayRef begins, const std::string& coding,
                   const std::string& value_dtype, const OptionalTensors& segments, double kept) {
  const CudaCall call("clear_bucket", "message", message);
  const size_t members = residuals.size();
  Layout layout(call.op(), ns, ks, offsets, selections, begins, coding, value_dtype, segments);
  CheckCounts(call.op(), "member", members, {selections.size(), velocities.empty() ? members : velocities.size()});
  call.CheckTensorHere("message", message, at::kByte);
  ReduceSelections bucket;
  for (size_t s = 0; s < ns.size(); ++s) {
    ReduceSelection sent{PlanOf(call, layout.formats()[s]), layout.PayloadIn(s, message), {}};
    layout.ForMembers(s, residuals, [&](size_t i) {
      Tensor residual = residuals[i];
      std::optional<Tensor> velocity = MemberOf(velocities, i);
      const int64_t n = residual.numel();
      float* own = MemoryData(call.op(), "residual", residual, n, call.device());
      float* moving = velocity ? MemoryData(call.op(), "velocity", *velocity, n, call.device()) : nullptr;
      sent.slices.push_back({layout.begin(i), n, {own, moving}});
    });
    bucket.push_back(std::move(sent));
  }
  const Tensor workspace = call.Bytes(reduce_workspace_size(bucket, 1));
  call.Run(clear_launch(bucket, static_cast<float>(kept), call.decode_status(), workspace.data_ptr(), call.stream()));
}

void ReduceBucketOp(const Tensor& gathered, TensorList outs, double scale, IntArrayRef ns, IntArrayRef ks,
                    IntArrayRef offsets, IntArrayRef selections, IntArrayRef begins, const std::string& coding,
                    const std::string& value_dtype, const OptionalTensors& segments) {
  const CudaCall call("reduce_bucket", "gathered", gathered);
  Layout layout(call.op(), ns, ks, offsets, selections, begins, coding, value_dtype, segments);
  CheckCounts(call.op(), "member", outs.size(), {selections.size()});
  call.CheckTensorHere("gathered", gathered, at::kByte);
  TORCH_CHECK_VALUE(gathered.dim() == 2 && gathered.size(0) > 0 && gathered.size(0) < kMostRanks, "hvd_sparse.",
                    call.op(), ": gathered must be [ranks, bytes], got ", gathered.sizes());
  ReduceSelections bucket;
  for (size_t s = 0; s < ns.size(); ++s) {
    ReduceSelection summed{PlanOf(call, layout.formats()[s]), layout.PayloadIn(s, gathered[0]), {}};
    layout.ForMembers(s, outs, [&](size_t i) {
      Tensor out = outs[i];
      call.CheckTensorHere("out", out, at::kFloat);
      summed.slices.push_back({layout.begin(i), out.numel(), {out.mutable_data_ptr<float>(), nullptr}});
    });
    bucket.push_back(std::move(summed));
  }
  const Tensor workspace = call.Bytes(reduce_workspace_size(bucket, gathered.size(0)));
  call.Run(reduce_launch(bucket, gathered.size(0), gathered.size(1), static_cast<float>(scale), call.decode_status(),
                         workspace.data_ptr(), call.stream()));
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_IMPL(hvd_sparse, CUDA, m) {
  m.impl("accumulate_bucket", &hvd_sparse::AccumulateBucketOp);
  m.impl("accumulate_bucket_hinted", &hvd_sparse::AccumulateBucketHintedOp);
  m.impl("clear_bucket", &hvd_sparse::ClearBucketOp);
  m.impl("reduce_bucket", &hvd_sparse::ReduceBucketOp);
}
