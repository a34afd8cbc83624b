// A bucket of tensors in one call: what costs little for each of many small tensors costs more to call.
#include <torch/library.h>

#include "../core/bucket.h"
#include "../core/hint.h"
#include "../core/reduce.h"
#include "bucket_layout.h"

namespace hvd_sparse {
namespace {

std::tuple<Tensor, Tensor> AccumulateBucketOp(TensorList gradients, TensorList residuals, TensorList velocities,
                                              TensorList parameters, at::ArrayRef<double> factors, double momentum,
                                              bool nesterov, at::ArrayRef<double> weight_decays, IntArrayRef ns,
                                              IntArrayRef ks, int64_t seed, at::ArrayRef<double> hints, Tensor out,
                                              IntArrayRef offsets, IntArrayRef selections, IntArrayRef begins,
                                              const std::string& coding, const std::string& value_dtype,
                                              const std::string& centre, const OptionalTensors& segments) {
  const char* op = "accumulate_bucket";
  const size_t members = gradients.size();
  Layout layout(op, ns, ks, offsets, selections, begins, coding, value_dtype, segments);
  CheckCounts(op, "selection", ns.size(), {hints.size()});
  CheckCounts(op, "member", members,
              {residuals.size(), factors.size(), weight_decays.size(), selections.size(),
               velocities.empty() ? members : velocities.size(), parameters.empty() ? members : parameters.size()});
  CheckTensor(op, "out", out, at::kByte);
  const Centre kind = ParseCentre(op, centre);
  Tensor info = at::empty({static_cast<int64_t>(ns.size()), 2}, at::kDouble);
  Tensor finite = at::empty({static_cast<int64_t>(members)}, at::kBool);
  auto* is_finite = finite.mutable_data_ptr<bool>();
  for (size_t s = 0; s < ns.size(); ++s) {
    std::vector<Tensor> flat;  // keeps copies of gradients that are not contiguous
    std::vector<Part> parts;
    layout.ForMembers(s, gradients, [&](size_t i) {
      flat.push_back(gradients[i].contiguous());
      Tensor residual = residuals[i];
      std::optional<Tensor> velocity = MemberOf(velocities, i);
      const Accumulation a = AsAccumulation(op, flat.back(), residual, velocity, MemberOf(parameters, i), factors[i],
                                            momentum, nesterov, weight_decays[i]);
      parts.push_back({a.gradient, a.params, a.memory, layout.begin(i)});
    });
    Selection found;
    Raise(op, AccumulateAndPack(parts, true, {ks[s], hints[s], static_cast<uint64_t>(seed)}, layout.formats()[s], kind,
                                TorchParallelFor, layout.PayloadIn(s, out), is_finite, &found));
    is_finite += parts.size();
    info.mutable_data_ptr<double>()[2 * s] = found.threshold;
    info.mutable_data_ptr<double>()[2 * s + 1] = static_cast<double>(found.passed);
  }
  return {info, finite};
}

std::tuple<Tensor, Tensor> AccumulateBucketHintedOp(TensorList gradients, TensorList residuals, TensorList velocities,
                                                    TensorList parameters, at::ArrayRef<double> factors,
                                                    double momentum, bool nesterov, at::ArrayRef<double> weight_decays,
                                                    IntArrayRef ns, IntArrayRef ks, int64_t seed, Tensor hints,
                                                    Tensor out, IntArrayRef offsets, IntArrayRef selections,
                                                    IntArrayRef begins, const std::string& coding,
                                                    const std::string& value_dtype, const std::string& centre,
                                                    const OptionalTensors& segments) {
  const char* op = "accumulate_bucket_hinted";
  CheckTensor(op, "hints", hints, at::kDouble);
  CheckHints(op, hints, ns.size());
  CheckCounts(op, "selection", ns.size(), {ks.size()});
  auto* kept = static_cast<Hint*>(hints.mutable_data_ptr());
  std::vector<double> values;
  for (size_t s = 0; s < ns.size(); ++s) values.push_back(HintFor(kept[s], ks[s]));
  auto found =
      AccumulateBucketOp(gradients, residuals, velocities, parameters, factors, momentum, nesterov, weight_decays, ns,
                         ks, seed, values, out, offsets, selections, begins, coding, value_dtype, centre, segments);
  const auto* info = std::get<0>(found).const_data_ptr<double>();
  for (size_t s = 0; s < ns.size(); ++s, info += 2) LearnHint(kept++, ks[s], info[0], static_cast<int64_t>(info[1]));
  return found;
}

void ClearBucketOp(const Tensor& message, TensorList residuals, TensorList velocities, IntArrayRef ns, IntArrayRef ks,
                   IntArrayRef offsets, IntArrayRef selections, IntArrayRef begins, const std::string& coding,
                   const std::string& value_dtype, const OptionalTensors& segments, double kept) {
  const char* op = "clear_bucket";
  const size_t members = residuals.size();
  Layout layout(op, ns, ks, offsets, selections, begins, coding, value_dtype, segments);
  CheckCounts(op, "member", members, {selections.size(), velocities.empty() ? members : velocities.size()});
  CheckTensor(op, "message", message, at::kByte);
  for (size_t s = 0; s < ns.size(); ++s) {
    std::vector<MemorySlice> slices;
    layout.ForMembers(s, residuals, [&](size_t i) {
      Tensor residual = residuals[i];
      std::optional<Tensor> velocity = MemberOf(velocities, i);
      const int64_t size = residual.numel();
      slices.push_back({layout.begin(i),
                        size,
                        {MemoryData(op, "residual", residual, size),
                         velocity ? MemoryData(op, "velocity", *velocity, size) : nullptr}});
    });
    Raise(op, ClearSent(layout.formats()[s], layout.PayloadIn(s, message), slices, static_cast<float>(kept)));
  }
}

void ReduceBucketOp(const Tensor& gathered, TensorList outs, double scale, IntArrayRef ns, IntArrayRef ks,
                    IntArrayRef offsets, IntArrayRef selections, IntArrayRef begins, const std::string& coding,
                    const std::string& value_dtype, const OptionalTensors& segments) {
  const char* op = "reduce_bucket";
  Layout layout(op, ns, ks, offsets, selections, begins, coding, value_dtype, segments);
  CheckCounts(op, "member", outs.size(), {selections.size()});
  CheckTensor(op, "gathered", gathered, at::kByte);
  TORCH_CHECK_VALUE(gathered.dim() == 2 && gathered.size(0) > 0, "hvd_sparse.", op,
                    ": gathered must be [ranks, bytes], got ", gathered.sizes());
  for (size_t s = 0; s < ns.size(); ++s) {
    std::vector<Slice> slices;
    layout.ForMembers(s, outs, [&](size_t i) {
      CheckTensor(op, "out", outs[i], at::kFloat);
      slices.push_back({layout.begin(i), outs[i].numel(), static_cast<float*>(outs[i].data_ptr())});
    });
    Raise(op, ReducePayloads(layout.formats()[s], layout.PayloadIn(s, gathered[0]), gathered.size(0), gathered.size(1),
                             static_cast<float>(scale), TorchParallelFor, slices));
  }
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_FRAGMENT(hvd_sparse, m) {
  m.def(
      "accumulate_bucket(Tensor[] gradients, Tensor(a!)[] residuals, Tensor(b!)[] velocities, Tensor[] parameters, "
      "float[] factors, float momentum, bool nesterov, float[] weight_decays, int[] ns, int[] ks, int seed, "
      "float[] hints, Tensor(c!) out, int[] offsets, int[] selections, int[] begins, str coding, str value_dtype, "
      "str centre, Tensor?[] segments) -> (Tensor, Tensor)");
  m.def(
      "accumulate_bucket_hinted(Tensor[] gradients, Tensor(a!)[] residuals, Tensor(b!)[] velocities, "
      "Tensor[] parameters, float[] factors, float momentum, bool nesterov, float[] weight_decays, int[] ns, int[] ks, "
      "int seed, Tensor(c!) hints, Tensor(d!) out, int[] offsets, int[] selections, int[] begins, str coding, "
      "str value_dtype, str centre, Tensor?[] segments) -> (Tensor, Tensor)");
  m.def(
      "clear_bucket(Tensor message, Tensor(a!)[] residuals, Tensor(b!)[] velocities, int[] ns, int[] ks, "
      "int[] offsets, int[] selections, int[] begins, str coding, str value_dtype, Tensor?[] segments, float kept) "
      "-> ()");
  m.def(
      "reduce_bucket(Tensor gathered, Tensor(a!)[] outs, float scale, int[] ns, int[] ks, int[] offsets, "
      "int[] selections, int[] begins, str coding, str value_dtype, Tensor?[] segments) -> ()");
}

TORCH_LIBRARY_IMPL(hvd_sparse, CPU, m) {
  m.impl("accumulate_bucket", &hvd_sparse::AccumulateBucketOp);
  m.impl("accumulate_bucket_hinted", &hvd_sparse::AccumulateBucketHintedOp);
  m.impl("clear_bucket", &hvd_sparse::ClearBucketOp);
  m.impl("reduce_bucket", &hvd_sparse::ReduceBucketOp);
}
