// Ops that process a bucket of CUDA tensors in one call. They do not wait for the device.
#include <torch/library.h>

#include <tuple>
#include <utility>
#include <vector>

#include "../cuda/bucket.h"
#include "bucket.h"
#include "cuda_arguments.h"

namespace hvd_sparse {
namespace {

PayloadPlan PlanOf(const CudaCall& call, const PayloadFormat& format) {
  PayloadPlan plan{};
  call.Check(MakePlan(format, &plan));
  return plan;
}

std::tuple<Tensor, Tensor> AccumulateBucketOp(TensorList gradients, TensorList residuals, TensorList velocities,
                                              TensorList parameters, at::ArrayRef<double> factors, double momentum,
                                              bool nesterov, at::ArrayRef<double> weight_decays, int64_t seed,
                                              Tensor hints, Tensor out, IntArrayRef sizes, IntArrayRef ks,
                                              IntArrayRef channels, bool joint, IntArrayRef members,
                                              const std::string& coding, const std::string& value_dtype,
                                              const std::string& level) {
  const CudaCall call("accumulate_bucket", "out", out);
  const char* op = call.op();
  const BucketInputs in{gradients, residuals, velocities, parameters, factors, momentum, nesterov, weight_decays};
  const Bucket bucket(op, ParseForm(op, sizes, channels, joint, coding, value_dtype), ks, members);
  in.Check(op, bucket.members());
  call.CheckTensorHere("hints", hints, at::kDouble);
  CheckHints(op, hints, ks.size());
  call.CheckTensorHere("out", out, at::kByte);
  TORCH_CHECK_VALUE(value_dtype != "float64", "hvd_sparse.", op,
                    ": residuals are float32, and so is what is sent of them; got value_dtype float64");
  bucket.CheckBytes("out", out.numel());
  std::vector<Tensor> flat;
  BucketSelections selections;
  for (const SelectionLayout& selection : bucket.selections()) {
    BucketSelection job{};
    job.plan = PlanOf(call, selection.format);
    job.payload = out.mutable_data_ptr<uint8_t>() + selection.offset;
    CheckAligned(call, "out", job.payload);
    job.parts = PartsOf(op, bucket, selection, in, call.device(), &flat);
    job.select.seed = static_cast<uint64_t>(seed);
    job.hint = static_cast<Hint*>(hints.mutable_data_ptr()) + selection.index;
    selections.push_back(std::move(job));
  }
  int64_t size = 0;
  call.Run(accumulate_bucket_workspace_size(selections, &size));
  const Tensor workspace = call.Bytes(size);
  Tensor info = call.Empty({static_cast<int64_t>(selections.size()), 2}, at::kDouble);
  Tensor finite = call.Empty({static_cast<int64_t>(bucket.members())}, at::kBool);
  call.Run(accumulate_bucket_launch(selections, true, ParseLevel(op, level), info.mutable_data_ptr<double>(),
                                    finite.mutable_data_ptr<bool>(), workspace.data_ptr(), call.stream()));
  return {info, finite};
}

void ClearBucketOp(const Tensor& message, TensorList residuals, TensorList velocities, IntArrayRef sizes,
                   IntArrayRef ks, IntArrayRef channels, bool joint, IntArrayRef members, const std::string& coding,
                   const std::string& value_dtype, double retained) {
  const CudaCall call("clear_bucket", "message", message);
  const char* op = call.op();
  const Bucket bucket(op, ParseForm(op, sizes, channels, joint, coding, value_dtype), ks, members);
  const size_t count = bucket.members();
  CheckCounts(op, "member", count, {{"residuals", residuals.size()}, Optional("velocities", velocities.size(), count)});
  call.CheckTensorHere("message", message, at::kByte);
  bucket.CheckBytes("message", message.numel());
  ReduceSelections sent;
  for (const SelectionLayout& selection : bucket.selections()) {
    sent.push_back({PlanOf(call, selection.format), message.const_data_ptr<uint8_t>() + selection.offset,
                    FeedbackOf(op, bucket, selection, residuals, velocities, call.device())});
  }
  const Tensor workspace = call.Bytes(reduce_workspace_size(sent, 1));
  call.Run(clear_launch(sent, static_cast<float>(retained), call.decode_status(), workspace.data_ptr(), call.stream()));
}

void ReduceBucketOp(const Tensor& gathered, TensorList outs, double scale, IntArrayRef sizes, IntArrayRef ks,
                    IntArrayRef channels, bool joint, IntArrayRef members, const std::string& coding,
                    const std::string& value_dtype) {
  const CudaCall call("reduce_bucket", "gathered", gathered);
  const char* op = call.op();
  const Bucket bucket(op, ParseForm(op, sizes, channels, joint, coding, value_dtype), ks, members);
  CheckCounts(op, "member", bucket.members(), {{"outs", outs.size()}});
  call.CheckTensorHere("gathered", gathered, at::kByte);
  TORCH_CHECK_VALUE(gathered.dim() == 2, "hvd_sparse.", op, ": gathered must be [ranks, bytes], got ",
                    gathered.sizes());
  call.Check(CheckRanks(gathered.size(0)));
  bucket.CheckBytes("gathered", gathered.size(1));
  ReduceSelections sums;
  for (const SelectionLayout& selection : bucket.selections()) {
    ReduceSelection sum{PlanOf(call, selection.format), gathered.const_data_ptr<uint8_t>() + selection.offset, {}};
    for (size_t i = selection.first; i < selection.last; ++i) {
      Tensor out = outs[i];
      call.CheckTensorHere("out", out, at::kFloat);
      bucket.CheckSize("out", out, i);
      sum.slices.push_back(
          {selection.begins[sum.slices.size()], out.numel(), {out.mutable_data_ptr<float>(), nullptr}});
    }
    sums.push_back(std::move(sum));
  }
  const Tensor workspace = call.Bytes(reduce_workspace_size(sums, gathered.size(0)));
  call.Run(reduce_launch(sums, gathered.size(0), gathered.size(1), static_cast<float>(scale), call.decode_status(),
                         workspace.data_ptr(), call.stream()));
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_IMPL(hvd_sparse, CUDA, m) {
  m.impl("accumulate_bucket", &hvd_sparse::AccumulateBucketOp);
  m.impl("clear_bucket", &hvd_sparse::ClearBucketOp);
  m.impl("reduce_bucket", &hvd_sparse::ReduceBucketOp);
}
