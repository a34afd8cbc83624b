// Ops on CUDA tensors whose numbers of entries vary from step to step. The host decides by what the device found, so
// they wait for it; only samples and single numbers are copied to the host.
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "../core/threshold.h"
#include "../cuda/accumulate.h"
#include "../cuda/filter.h"
#include "../cuda/sample.h"
#include "../cuda/select.h"
#include "bucket.h"
#include "cuda_arguments.h"

namespace hvd_sparse {
namespace {

// Copies the values of a sample of runs, or with count 0 all values, to `out`. Returns their number.
int64_t TakeSample(const CudaCall& call, const Tensor& values, int64_t count, int64_t run, uint64_t seed, Tensor out) {
  if (count == 0) {
    out.narrow(0, 0, values.numel()).copy_(values);
    return values.numel();
  }
  call.Run(sample_runs_launch(values.const_data_ptr<float>(), values.numel(), count, run, seed,
                              out.mutable_data_ptr<float>(), call.stream()));
  return count * run;
}

// Returns the residuals of elements [begin, end) of the parts, with `nothing` where there is no part.
Tensor PartitionOf(const CudaCall& call, const std::vector<Part>& parts, int64_t begin, int64_t end, float nothing) {
  const auto options = at::TensorOptions().device(call.device()).dtype(at::kFloat);
  const auto gap = [&](int64_t size) { return at::full({size}, nothing, options); };
  const int64_t size = end - begin;
  std::vector<Part> inside;
  for (const Part& part : parts) {
    const Part cut = CutPart(part, begin, end);
    if (cut.gradient.size > 0) inside.push_back(cut);
  }
  if (inside.empty()) return gap(size);
  float* joined = ContiguousResiduals(inside, size);
  if (joined != nullptr) return at::from_blob(joined, {size}, options);
  std::vector<Tensor> pieces;
  int64_t at = 0;
  for (const Part& part : inside) {
    if (part.begin > at) pieces.push_back(gap(part.begin - at));
    pieces.push_back(at::from_blob(part.feedback.residual, {part.gradient.size}, options));
    at = part.begin + part.gradient.size;
  }
  if (at < size) pieces.push_back(gap(size - at));
  return at::cat(pieces);
}

// Returns the ascending indices of `count` values that reach the threshold.
Tensor IndicesReaching(const CudaCall& call, const Array& values, double threshold, int64_t count) {
  Tensor indices = call.Empty({count}, at::kLong);
  if (count == 0) return indices;
  const Tensor selected = call.Empty({count}, at::kFloat);
  int64_t size = 0;
  call.Run(filter_threshold_workspace_size(values.size, count, &size));
  const Tensor workspace = call.Bytes(size);
  call.Run(filter_threshold_launch(values, threshold, count, indices.mutable_data_ptr<int64_t>(), selected.data_ptr(),
                                   workspace.data_ptr(), call.stream()));
  return indices;
}

// Returns the ascending indices of the `count` largest values that are not zero, and the smallest of their magnitudes,
// 0 if all values are zero.
std::tuple<Tensor, double> IndicesOfLargest(const CudaCall& call, const Array& values, int64_t count, double hint,
                                            uint64_t seed) {
  Tensor indices = call.Empty({count}, at::kLong);
  Tensor selected = call.Empty({count}, at::kFloat);
  Tensor info = call.Empty({2}, at::kDouble);
  int64_t size = 0;
  call.Run(select_top_k_workspace_size(values.dtype, values.size, count, &size));
  const Tensor workspace = call.Bytes(size);
  SelectOutput output{};
  output.indices = indices.mutable_data_ptr<int64_t>();
  output.values = selected.data_ptr();
  output.info = info.mutable_data_ptr<double>();
  call.Run(select_top_k_launch(values, {count, hint, seed}, output, workspace.data_ptr(), call.stream()));
  const double smallest = info[0].item<double>();
  if (smallest > 0) return {indices, smallest};
  const Tensor nonzero = selected.abs().gt(0);  // not of NaN
  const Tensor magnitudes = selected.masked_select(nonzero).abs();
  const double least = magnitudes.numel() > 0 ? magnitudes.min().item<double>() : 0;
  return {indices.masked_select(nonzero), least};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> AccumulatePartitionOp(TensorList gradients, TensorList residuals,
                                                                 at::ArrayRef<double> factors, IntArrayRef begins,
                                                                 int64_t begin, int64_t end, double threshold,
                                                                 double share, int64_t sample, int64_t seed) {
  const char* op = "accumulate_partition";
  const size_t members = gradients.size();
  TORCH_CHECK_VALUE(members > 0, "hvd_sparse.", op, ": there must be at least one gradient");
  const CudaCall call(op, "gradient", gradients[0]);
  std::vector<Tensor> flat;
  const std::vector<Part> parts = VectorParts(op, gradients, residuals, factors, begins, call.device(), &flat);
  const PartitionParams params{begin, end, threshold, share, sample, static_cast<uint64_t>(seed)};
  call.Check(CheckPartition(parts, params));
  Tensor finite = call.Empty({static_cast<int64_t>(members)}, at::kBool);
  const Tensor tables = call.Bytes(accumulate_workspace_size(parts));
  call.Run(accumulate_launch(parts, finite.mutable_data_ptr<bool>(), tables.data_ptr(), call.stream()));

  // Zeros are not selected, unless all elements may be that reach a threshold of 0; NaN never is.
  const Tensor own = PartitionOf(call, parts, begin, end, share < 0 ? NAN : 0.0f);
  const Array values = AsArray(op, own);
  const PartitionRule rule(params);
  Partitioned result;
  result.threshold = threshold;
  Tensor sampled = at::empty({0}, at::kFloat);
  const bool is_shared = share >= 0;
  if (is_shared && values.size > 0) {
    sampled = call.Empty({rule.runs() == 0 ? values.size : rule.runs() * kSketchRun}, at::kFloat);
    TakeSample(call, own, rule.runs(), kSketchRun, params.seed, sampled);
    sampled = sampled.cpu();
  }
  const double bar = is_shared ? std::max(threshold, kSmallestFloat) : threshold;
  const Tensor found = at::zeros({}, at::TensorOptions().device(call.device()).dtype(at::kLong));
  call.Run(count_reaching_launch(values, bar, static_cast<unsigned long long*>(found.data_ptr()), call.stream()));
  const auto count = found.item<int64_t>();
  Tensor indices = call.Empty({0}, at::kLong);
  const bool fits = !is_shared || rule.Fits(count);
  if (fits) {
    indices = IndicesReaching(call, values, bar, count);
  } else if (values.size > 0) {
    const int64_t most = std::max<int64_t>(1, rule.wanted());
    std::tie(indices, result.threshold) = IndicesOfLargest(call, values, most, kRereadMargin * threshold, params.seed);
    if (rule.wanted() == 0) indices = indices.narrow(0, 0, 0);
  }
  if (is_shared) {
    result.indices.resize(static_cast<size_t>(indices.numel()));  // only their number is used
    SketchSample(sampled.const_data_ptr<float>(), sampled.numel(), rule, fits, &result);
  }
  return {indices.add(begin), SketchTensor(result), at::scalar_tensor(result.threshold, at::kDouble), finite};
}

// Copies one sample of each tensor to the host, all in one copy, and fits there, as the core does.
Tensor FitThresholdsOp(TensorList residuals, IntArrayRef ks, IntArrayRef stages, const std::string& distribution,
                       int64_t seed) {
  const char* op = "fit_thresholds";
  const size_t members = residuals.size();
  CheckCounts(op, "member", members, {{"ks", ks.size()}, {"stages", stages.size()}});
  const Distribution kind = ParseDistribution(op, distribution);
  Tensor fits = at::empty({static_cast<int64_t>(members), 2}, at::kDouble);
  if (members == 0) return fits;
  const CudaCall call(op, "residual", residuals[0]);
  std::vector<int64_t> runs;
  int64_t total = 0;
  for (size_t i = 0; i < members; ++i) {
    call.CheckTensorHere("residual", residuals[i], at::kFloat);
    call.Check(CheckCount(ks[i], residuals[i].numel()));
    CheckStages(op, stages[i]);
    runs.push_back(FitRuns(residuals[i].numel(), ks[i]));
    total += runs[i] == 0 ? residuals[i].numel() : runs[i] * kFitRun;
  }
  Tensor samples = call.Empty({total}, at::kFloat);
  std::vector<int64_t> begins{0};
  for (size_t i = 0; i < members; ++i) {
    const Tensor rest = samples.narrow(0, begins[i], total - begins[i]);
    begins.push_back(begins[i] +
                     TakeSample(call, residuals[i].view({-1}), runs[i], kFitRun, static_cast<uint64_t>(seed), rest));
  }
  const Tensor here = samples.cpu();
  const auto* values = here.const_data_ptr<float>();
  FitEach(members, fits.mutable_data_ptr<double>(), [&](size_t i, FitScratch* scratch) {
    const double density = static_cast<double>(ks[i]) / static_cast<double>(residuals[i].numel());
    return FitTail(values + begins[i], begins[i + 1] - begins[i], density,
                   {stages[i], kind, static_cast<uint64_t>(seed)}, scratch);
  });
  return fits;
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_IMPL(hvd_sparse, CUDA, m) {
  m.impl("accumulate_partition", &hvd_sparse::AccumulatePartitionOp);
  m.impl("fit_thresholds", &hvd_sparse::FitThresholdsOp);
}
