// A bucket of CUDA tensors in one call, each with a selection of its own. Nothing here waits for the device.
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <tuple>
#include <vector>

#include "../cuda/pack.h"
#include "../cuda/select.h"
#include "cuda_arguments.h"

namespace hvd_sparse {
namespace {

using at::IntArrayRef;
using at::TensorList;
using OptionalTensors = c10::List<std::optional<Tensor>>;

void CheckMembers(const CudaCall& call, size_t members, std::initializer_list<size_t> sizes) {
  for (const size_t size : sizes) {
    TORCH_CHECK_VALUE(size == members, "hvd_sparse.", call.op(), ": every list must be ", members,
                      ", one a member; got ", size);
  }
}

// On the CPU several tensors may share a selection; here member i is selection i.
void CheckOwnSelections(const CudaCall& call, TensorList members, IntArrayRef ns, IntArrayRef selections,
                        IntArrayRef begins) {
  CheckMembers(call, members.size(), {ns.size(), selections.size(), begins.size()});
  for (size_t i = 0; i < members.size(); ++i) {
    const bool is_own = selections[i] == static_cast<int64_t>(i) && begins[i] == 0 && ns[i] == members[i].numel();
    TORCH_CHECK_VALUE(is_own, "hvd_sparse.", call.op(), ": on CUDA devices each member has a selection of its own; ",
                      "member ", i, " shares selection ", selections[i], " of ", ns[i], " elements");
  }
}

uint8_t* Part(const CudaCall& call, const PayloadPlan& plan, const Tensor& message, int64_t offset) {
  TORCH_CHECK_VALUE(offset >= 0 && plan.size <= message.numel() - offset, "hvd_sparse.", call.op(), ": a payload of ",
                    plan.size, " bytes at offset ", offset, " leaves the message of ", message.numel());
  return static_cast<uint8_t*>(message.data_ptr()) + offset;
}

std::optional<Tensor> MemberOf(TensorList list, size_t i) {
  return list.empty() ? std::optional<Tensor>() : std::optional<Tensor>(list[i]);
}

// The pieces of a workspace that the members of a bucket use in turn.
struct MemberWork {
  MemberWork(const CudaCall& call, void* base, int64_t n, int64_t k) {
    int64_t select_size = 0;
    call.Run(select_top_k_workspace_size(DType::kFloat32, n, k, &select_size));
    Workspace workspace(base);
    select = workspace.Take<uint8_t>(select_size);
    pack = workspace.Take<uint8_t>(pack_workspace_size());
    indices = workspace.Take<int64_t>(k);
    values = workspace.Take<float>(k);
    size = workspace.used();
  }

  void* select;
  void* pack;
  int64_t* indices;
  float* values;
  int64_t size;
};

// What to do with each tensor of a bucket.
struct BucketRule {
  double momentum;
  bool nesterov;
  double weight_decay;
  uint64_t seed;
};

struct BucketLists {
  TensorList gradients, residuals, velocities, parameters;
  at::ArrayRef<double> factors;
  IntArrayRef ks, offsets;
  const OptionalTensors& segments;
  const std::string& coding;
  const std::string& value_dtype;
};

void CheckLists(const CudaCall& call, const BucketLists& lists, const Tensor& out) {
  const size_t members = lists.gradients.size();
  CheckMembers(call, members,
               {lists.residuals.size(), lists.factors.size(), lists.ks.size(), lists.offsets.size(),
                lists.segments.size(), lists.velocities.empty() ? members : lists.velocities.size(),
                lists.parameters.empty() ? members : lists.parameters.size()});
  call.CheckTensorHere("out", out, at::kByte);
  TORCH_CHECK_VALUE(lists.value_dtype != "float64", "hvd_sparse.", call.op(),
                    ": residuals are float32, and so is what is sent of them; got value_dtype float64");
}

std::vector<PayloadPlan> PlansOf(const CudaCall& call, TensorList tensors, IntArrayRef ks,
                                 const OptionalTensors& segments, const std::string& coding,
                                 const std::string& value_dtype) {
  std::vector<PayloadPlan> plans;
  for (size_t i = 0; i < tensors.size(); ++i) {
    plans.push_back(ParsePlan(call, tensors[i].numel(), ks[i], coding, value_dtype, segments.get(i)));
  }
  return plans;
}

void AccumulateMember(const CudaCall& call, const BucketLists& lists, const BucketRule& rule, const PayloadPlan& plan,
                      size_t i, double hint, Hint* kept_hint, const Tensor& out, void* workspace, double* info) {
  const Tensor gradient = lists.gradients[i];
  call.CheckTensorHere("gradient", gradient.contiguous(), gradient.scalar_type());
  const Tensor flat = gradient.contiguous();
  Tensor residual = lists.residuals[i];
  std::optional<Tensor> velocity = MemberOf(lists.velocities, i);
  const Accumulation a = AsAccumulation(call.op(), flat, residual, velocity, MemberOf(lists.parameters, i),
                                        lists.factors[i], rule.momentum, rule.nesterov, rule.weight_decay);
  uint8_t* part = Part(call, plan, out, lists.offsets[i]);
  CheckAligned(call, "out", part);
  const MemberWork work(call, workspace, plan.n, plan.k);
  call.Run(accumulate_top_k_launch(a.gradient, a.params, {plan.k, hint, rule.seed}, a.memory,
                                   {work.indices, work.values, info, kept_hint}, work.select, call.stream()));
  call.Run(pack_launch(plan, work.indices, work.values, plan.k, part, work.pack, call.stream()));
}

// `hints` are numbers of the host's, or `kept`, one a member, lie on the device and learn there. Returns threshold and
// how many elements reached the hint, [members, 2], and whether each gradient was finite.
std::tuple<Tensor, Tensor> AccumulateMembers(const CudaCall& call, const BucketLists& lists, const BucketRule& rule,
                                             Tensor out, at::ArrayRef<double> hints, Hint* kept) {
  CheckLists(call, lists, out);
  const std::vector<PayloadPlan> plans =
      PlansOf(call, lists.gradients, lists.ks, lists.segments, lists.coding, lists.value_dtype);
  int64_t size = 0;
  for (const PayloadPlan& plan : plans) size = std::max(size, MemberWork(call, nullptr, plan.n, plan.k).size);
  const Tensor workspace = call.Bytes(size);
  Tensor info = call.Empty({static_cast<int64_t>(plans.size()), 3}, at::kDouble);
  for (size_t i = 0; i < plans.size(); ++i) {
    AccumulateMember(call, lists, rule, plans[i], i, kept == nullptr ? hints[i] : 0.0,
                     kept == nullptr ? nullptr : kept + i, out, workspace.data_ptr(),
                     info.mutable_data_ptr<double>() + 3 * i);
  }
  return {info.narrow(1, 0, 2).contiguous(), info.select(1, 2).ne(0)};
}

std::tuple<Tensor, Tensor> AccumulateBucketOp(TensorList gradients, TensorList residuals, TensorList velocities,
                                              TensorList parameters, at::ArrayRef<double> factors, double momentum,
                                              bool nesterov, double weight_decay, IntArrayRef ns, IntArrayRef ks,
                                              int64_t seed, at::ArrayRef<double> hints, Tensor out, IntArrayRef offsets,
                                              IntArrayRef selections, IntArrayRef begins, const std::string& coding,
                                              const std::string& value_dtype, const std::string& centre,
                                              const OptionalTensors& segments) {
  const CudaCall call("accumulate_bucket", "out", out);
  ParseCentre(call.op(), centre);
  CheckMembers(call, gradients.size(), {hints.size()});
  CheckOwnSelections(call, gradients, ns, selections, begins);
  const BucketLists lists{gradients, residuals, velocities, parameters, factors,
                          ks,        offsets,   segments,   coding,     value_dtype};
  const BucketRule rule{momentum, nesterov, weight_decay, static_cast<uint64_t>(seed)};
  return AccumulateMembers(call, lists, rule, out, hints, nullptr);
}

std::tuple<Tensor, Tensor> AccumulateBucketHintedOp(TensorList gradients, TensorList residuals, TensorList velocities,
                                                    TensorList parameters, at::ArrayRef<double> factors,
                                                    double momentum, bool nesterov, double weight_decay, IntArrayRef ns,
                                                    IntArrayRef ks, int64_t seed, Tensor hints, Tensor out,
                                                    IntArrayRef offsets, IntArrayRef selections, IntArrayRef begins,
                                                    const std::string& coding, const std::string& value_dtype,
                                                    const OptionalTensors& segments) {
  const CudaCall call("accumulate_bucket_hinted", "out", out);
  call.CheckTensorHere("hints", hints, at::kDouble);
  const auto members = static_cast<int64_t>(gradients.size());
  TORCH_CHECK_VALUE(hints.dim() == 2 && hints.size(0) == members && hints.size(1) == 3, "hvd_sparse.", call.op(),
                    ": hints must be [", members, ", 3], got ", hints.sizes());
  CheckOwnSelections(call, gradients, ns, selections, begins);
  const BucketLists lists{gradients, residuals, velocities, parameters, factors,
                          ks,        offsets,   segments,   coding,     value_dtype};
  const BucketRule rule{momentum, nesterov, weight_decay, static_cast<uint64_t>(seed)};
  return AccumulateMembers(call, lists, rule, out, {}, static_cast<Hint*>(hints.data_ptr()));
}

void ClearBucketOp(const Tensor& message, TensorList residuals, TensorList velocities, IntArrayRef ns, IntArrayRef ks,
                   IntArrayRef offsets, IntArrayRef selections, IntArrayRef begins, const std::string& coding,
                   const std::string& value_dtype, const OptionalTensors& segments, double kept) {
  const CudaCall call("clear_bucket", "message", message);
  TORCH_CHECK_VALUE(kept == 0, "hvd_sparse.clear_bucket: on CUDA devices kept must be 0, got ", kept);
  CheckOwnSelections(call, residuals, ns, selections, begins);
  const size_t members = residuals.size();
  CheckMembers(call, members,
               {offsets.size(), ks.size(), segments.size(), velocities.empty() ? members : velocities.size()});
  call.CheckTensorHere("message", message, at::kByte);
  const std::vector<PayloadPlan> plans = PlansOf(call, residuals, ks, segments, coding, value_dtype);
  int64_t size = 0;
  for (const PayloadPlan& plan : plans) size = std::max(size, unpack_workspace_size(plan));
  const Tensor workspace = call.Bytes(size);
  for (size_t i = 0; i < members; ++i) {
    Tensor residual = residuals[i];
    std::optional<Tensor> velocity = MemberOf(velocities, i);
    const int64_t n = plans[i].n;
    call.Run(clear_launch(plans[i], Part(call, plans[i], message, offsets[i]),
                          MemoryData(call.op(), "residual", residual, n, call.device()),
                          velocity ? MemoryData(call.op(), "velocity", *velocity, n, call.device()) : nullptr,
                          call.decode_status(), workspace.data_ptr(), call.stream()));
  }
}

void ReduceBucketOp(const Tensor& gathered, TensorList outs, double scale, IntArrayRef ns, IntArrayRef ks,
                    IntArrayRef offsets, IntArrayRef selections, IntArrayRef begins, const std::string& coding,
                    const std::string& value_dtype, const OptionalTensors& segments) {
  const CudaCall call("reduce_bucket", "gathered", gathered);
  CheckOwnSelections(call, outs, ns, selections, begins);
  CheckMembers(call, outs.size(), {offsets.size(), ks.size(), segments.size()});
  call.CheckTensorHere("gathered", gathered, at::kByte);
  TORCH_CHECK_VALUE(gathered.dim() == 2 && gathered.size(0) > 0 && gathered.size(0) < kMostRanks, "hvd_sparse.",
                    call.op(), ": gathered must be [ranks, bytes], got ", gathered.sizes());
  const std::vector<PayloadPlan> plans = PlansOf(call, outs, ks, segments, coding, value_dtype);
  int64_t size = 0;
  for (const PayloadPlan& plan : plans) size = std::max(size, reduce_payloads_workspace_size(plan, gathered.size(0)));
  const Tensor workspace = call.Bytes(size);
  for (size_t i = 0; i < plans.size(); ++i) {
    Tensor out = outs[i];
    call.CheckTensorHere("out", out, at::kFloat);
    call.Run(reduce_payloads_launch(plans[i], Part(call, plans[i], gathered[0], offsets[i]), gathered.size(0),
                                    gathered.size(1), static_cast<float>(scale), out.mutable_data_ptr<float>(),
                                    call.decode_status(), workspace.data_ptr(), call.stream()));
  }
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_FRAGMENT(hvd_sparse, m) {
  m.def(
      "accumulate_bucket_hinted(Tensor[] gradients, Tensor(a!)[] residuals, Tensor(b!)[] velocities, "
      "Tensor[] parameters, float[] factors, float momentum, bool nesterov, float weight_decay, int[] ns, int[] ks, "
      "int seed, Tensor(c!) hints, Tensor(d!) out, int[] offsets, int[] selections, int[] begins, str coding, "
      "str value_dtype, Tensor?[] segments) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(hvd_sparse, CUDA, m) {
  m.impl("accumulate_bucket", &hvd_sparse::AccumulateBucketOp);
  m.impl("accumulate_bucket_hinted", &hvd_sparse::AccumulateBucketHintedOp);
  m.impl("clear_bucket", &hvd_sparse::ClearBucketOp);
  m.impl("reduce_bucket", &hvd_sparse::ReduceBucketOp);
}
