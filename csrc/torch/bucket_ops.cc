// Ops that process a bucket of tensors in one call. For small tensors, the overhead of a call exceeds the work.
#include <torch/library.h>

#include "../core/hint.h"
#include "../core/reduce.h"
#include "bucket.h"

namespace hvd_sparse {
namespace {

std::tuple<Tensor, Tensor> AccumulateBucketOp(TensorList gradients, TensorList residuals, TensorList velocities,
                                              TensorList parameters, at::ArrayRef<double> factors, double momentum,
                                              bool nesterov, at::ArrayRef<double> weight_decays, int64_t seed,
                                              Tensor hints, Tensor out, IntArrayRef sizes, IntArrayRef ks,
                                              IntArrayRef channels, bool joint, IntArrayRef members,
                                              const std::string& coding, const std::string& value_dtype,
                                              const std::string& level) {
  const char* op = "accumulate_bucket";
  const BucketInputs in{gradients, residuals, velocities, parameters, factors, momentum, nesterov, weight_decays};
  const Bucket bucket(op, ParseForm(op, sizes, channels, joint, coding, value_dtype), ks, members);
  in.Check(op, bucket.members());
  CheckTensor(op, "hints", hints, at::kDouble);
  CheckHints(op, hints, ks.size());
  CheckTensor(op, "out", out, at::kByte);
  bucket.CheckBytes("out", out.numel());
  const Level kind = ParseLevel(op, level);
  Tensor info = at::empty({static_cast<int64_t>(bucket.selections().size()), 2}, at::kDouble);
  Tensor finite = at::empty({static_cast<int64_t>(bucket.members())}, at::kBool);
  std::vector<Tensor> flat;
  std::vector<std::vector<Part>> parts;  // all members are checked before one changes
  for (const SelectionLayout& selection : bucket.selections()) {
    parts.push_back(PartsOf(op, bucket, selection, in, at::kCPU, &flat));
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const SelectionLayout& selection = bucket.selections()[i];
    const int64_t k = selection.format.k;
    Hint* hint = static_cast<Hint*>(hints.mutable_data_ptr()) + selection.index;
    Selection found;
    Raise(op, AccumulateAndPack(parts[i], true, {k, HintFor(*hint, k), static_cast<uint64_t>(seed)}, selection.format,
                                kind, TorchParallelFor, out.mutable_data_ptr<uint8_t>() + selection.offset,
                                finite.mutable_data_ptr<bool>() + selection.first, &found));
    LearnHint(hint, k, found.threshold, found.passed);
    double* row = info.mutable_data_ptr<double>() + 2 * i;
    row[0] = found.threshold;
    row[1] = static_cast<double>(found.passed);
  }
  return {info, finite};
}

void ClearBucketOp(const Tensor& message, TensorList residuals, TensorList velocities, IntArrayRef sizes,
                   IntArrayRef ks, IntArrayRef channels, bool joint, IntArrayRef members, const std::string& coding,
                   const std::string& value_dtype, double retained) {
  const char* op = "clear_bucket";
  const Bucket bucket(op, ParseForm(op, sizes, channels, joint, coding, value_dtype), ks, members);
  const size_t count = bucket.members();
  CheckCounts(op, "member", count, {{"residuals", residuals.size()}, Optional("velocities", velocities.size(), count)});
  CheckTensor(op, "message", message, at::kByte);
  bucket.CheckBytes("message", message.numel());
  std::vector<std::vector<FeedbackSlice>> slices;  // all members are checked before one changes
  for (const SelectionLayout& selection : bucket.selections()) {
    slices.push_back(FeedbackOf(op, bucket, selection, residuals, velocities, at::kCPU));
  }
  for (size_t i = 0; i < slices.size(); ++i) {
    const SelectionLayout& selection = bucket.selections()[i];
    Raise(op, ClearSent(selection.format, message.const_data_ptr<uint8_t>() + selection.offset, slices[i],
                        static_cast<float>(retained)));
  }
}

void ReduceBucketOp(const Tensor& gathered, TensorList outs, double scale, IntArrayRef sizes, IntArrayRef ks,
                    IntArrayRef channels, bool joint, IntArrayRef members, const std::string& coding,
                    const std::string& value_dtype) {
  const char* op = "reduce_bucket";
  const Bucket bucket(op, ParseForm(op, sizes, channels, joint, coding, value_dtype), ks, members);
  CheckCounts(op, "member", bucket.members(), {{"outs", outs.size()}});
  CheckTensor(op, "gathered", gathered, at::kByte);
  TORCH_CHECK_VALUE(gathered.dim() == 2, "hvd_sparse.", op, ": gathered must be [ranks, bytes], got ",
                    gathered.sizes());
  Raise(op, CheckRanks(gathered.size(0)));
  bucket.CheckBytes("gathered", gathered.size(1));
  std::vector<Sum> sums;
  for (const SelectionLayout& selection : bucket.selections()) {
    std::vector<Slice> slices;
    for (size_t i = selection.first; i < selection.last; ++i) {
      CheckTensor(op, "out", outs[i], at::kFloat);
      bucket.CheckSize("out", outs[i], i);
      slices.push_back({selection.begins[slices.size()], bucket.size(i), static_cast<float*>(outs[i].data_ptr())});
    }
    sums.push_back({selection.format, {}, std::move(slices)});
    Raise(op, AppendSources(selection.format, gathered.const_data_ptr<uint8_t>() + selection.offset, gathered.size(0),
                            gathered.size(1), &sums.back().sources));
  }
  Raise(op, ReduceSums(sums, static_cast<float>(scale), TorchParallelFor));
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_FRAGMENT(hvd_sparse, m) {
  m.def(
      "accumulate_bucket(Tensor[] gradients, Tensor(a!)[] residuals, Tensor(b!)[] velocities, Tensor[] parameters, "
      "float[] factors, float momentum, bool nesterov, float[] weight_decays, int seed, Tensor(c!) hints, "
      "Tensor(d!) out, int[] sizes, int[] ks, int[] channels, bool joint, int[] members, str coding, str value_dtype, "
      "str level) -> (Tensor, Tensor)");
  m.def(
      "clear_bucket(Tensor message, Tensor(a!)[] residuals, Tensor(b!)[] velocities, int[] sizes, int[] ks, "
      "int[] channels, bool joint, int[] members, str coding, str value_dtype, float retained) -> ()");
  m.def(
      "reduce_bucket(Tensor gathered, Tensor(a!)[] outs, float scale, int[] sizes, int[] ks, int[] channels, "
      "bool joint, int[] members, str coding, str value_dtype) -> ()");
}

TORCH_LIBRARY_IMPL(hvd_sparse, CPU, m) {
  HVD_SPARSE_IMPL("accumulate_bucket", AccumulateBucketOp);
  HVD_SPARSE_IMPL("clear_bucket", ClearBucketOp);
  HVD_SPARSE_IMPL("reduce_bucket", ReduceBucketOp);
}
