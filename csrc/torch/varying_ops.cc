// Ops on several tensors whose numbers of entries vary from step to step: filters, fits, MiCRO's partition.
#include <torch/library.h>

#include "../core/reduce.h"
#include "../core/threshold.h"
#include "bucket.h"

namespace hvd_sparse {
namespace {

std::tuple<Tensor, Tensor, Tensor> FilterBucketOp(TensorList gradients, TensorList residuals, TensorList velocities,
                                                  TensorList parameters, at::ArrayRef<double> factors, double momentum,
                                                  bool nesterov, at::ArrayRef<double> weight_decays, bool is_active,
                                                  at::ArrayRef<double> thresholds, IntArrayRef ks,
                                                  const std::string& coding, const std::string& value_dtype,
                                                  const std::string& level, IntArrayRef channels, IntArrayRef stages,
                                                  const std::string& distribution, int64_t seed) {
  const char* op = "filter_bucket";
  const size_t members = gradients.size();
  const BucketInputs in{gradients, residuals, velocities, parameters, factors, momentum, nesterov, weight_decays};
  in.Check(op, members);
  CheckCounts(op, "member", members,
              {{"thresholds", thresholds.size()}, {"ks", ks.size()}, Optional("stages", stages.size(), members)});
  const Distribution shape = ParseDistribution(op, distribution);
  std::vector<int64_t> ns;
  for (const Tensor& gradient : gradients) ns.push_back(gradient.numel());
  const std::vector<PayloadFormat> formats = FormatsOf(op, ns, channels, coding, value_dtype);
  const Level kind = ParseLevel(op, level);
  std::vector<uint8_t> message;
  Tensor info = at::empty({static_cast<int64_t>(members), 3}, at::kDouble);
  Tensor finite = at::empty({static_cast<int64_t>(members)}, at::kBool);
  std::vector<Tensor> flat;
  std::vector<Part> parts;
  std::vector<FilterParams> filters(members);
  for (size_t i = 0; i < members; ++i) {  // all members are checked before one changes
    parts.push_back(in.PartOf(op, i, 0, at::kCPU, &flat));
    const FitParams fit{stages.empty() ? 0 : stages[i], shape, static_cast<uint64_t>(seed)};
    filters[i] = MakeFilter(thresholds[i], ks[i], fit);
    Raise(op, CheckFilter(parts[i], filters[i], formats[i]));
  }
  for (size_t i = 0; i < members; ++i) {
    double* row = info.mutable_data_ptr<double>() + 3 * i;
    Filtered found;
    row[2] = static_cast<double>(message.size());
    Raise(op, FilterAndPack(parts[i], is_active, filters[i], formats[i], kind, TorchParallelFor, &message,
                            finite.mutable_data_ptr<bool>() + i, &found));
    row[0] = found.threshold;
    row[1] = static_cast<double>(found.count);
  }
  Tensor out = at::empty({static_cast<int64_t>(message.size())}, at::kByte);
  std::copy(message.begin(), message.end(), out.mutable_data_ptr<uint8_t>());
  return {out, info, finite};
}

void ReduceLocatedBucketOp(const Tensor& gathered, IntArrayRef ns, int64_t ranks, TensorList outs, IntArrayRef places,
                           double scale, const std::string& coding, const std::string& value_dtype,
                           IntArrayRef channels) {
  const char* op = "reduce_located_bucket";
  CheckTensor(op, "gathered", gathered, at::kByte);
  CheckCounts(op, "sum", outs.size(), {{"places", places.size()}});
  std::vector<float*> sums(ns.size(), nullptr);
  for (size_t i = 0; i < outs.size(); ++i) {
    const int64_t place = places[i];
    TORCH_CHECK_VALUE(place >= 0 && place < static_cast<int64_t>(ns.size()), "hvd_sparse.", op,
                      ": places must be in [0, ", ns.size(), "), got ", place);
    CheckTensor(op, "out", outs[i], at::kFloat);
    const int64_t n = ns[static_cast<size_t>(place)];
    TORCH_CHECK_VALUE(outs[i].numel() == n, "hvd_sparse.", op, ": out must have ", n, " elements, got ",
                      outs[i].numel());
    TORCH_CHECK_VALUE(sums[static_cast<size_t>(place)] == nullptr, "hvd_sparse.", op, ": place ", place,
                      " must be given once");
    sums[static_cast<size_t>(place)] = static_cast<float*>(outs[i].data_ptr());
  }
  Raise(op, ReduceLocated(FormatsOf(op, ns, channels, coding, value_dtype), ranks, gathered.const_data_ptr<uint8_t>(),
                          gathered.numel(), static_cast<float>(scale), TorchParallelFor, sums));
}

Tensor FitThresholdsOp(TensorList residuals, IntArrayRef ks, IntArrayRef stages, const std::string& distribution,
                       int64_t seed) {
  const char* op = "fit_thresholds";
  CheckCounts(op, "member", residuals.size(), {{"ks", ks.size()}, {"stages", stages.size()}});
  const Distribution kind = ParseDistribution(op, distribution);
  Tensor fits = at::empty({static_cast<int64_t>(residuals.size()), 2}, at::kDouble);
  std::vector<const float*> values;
  for (size_t i = 0; i < residuals.size(); ++i) {
    CheckTensor(op, "residual", residuals[i], at::kFloat);
    Raise(op, CheckCount(ks[i], residuals[i].numel()));
    CheckStages(op, stages[i]);
    values.push_back(residuals[i].const_data_ptr<float>());
  }
  FitEach(residuals.size(), fits.mutable_data_ptr<double>(), [&](size_t i, FitScratch* scratch) {
    FitSample sample(residuals[i].numel(), ks[i], {stages[i], kind, static_cast<uint64_t>(seed)}, scratch);
    return sample.Run(values[i]);
  });
  return fits;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> AccumulatePartitionOp(TensorList gradients, TensorList residuals,
                                                                 at::ArrayRef<double> factors, IntArrayRef begins,
                                                                 int64_t begin, int64_t end, double threshold,
                                                                 double share, int64_t sample, int64_t seed) {
  const char* op = "accumulate_partition";
  const size_t members = gradients.size();
  std::vector<Tensor> flat;
  const std::vector<Part> parts = VectorParts(op, gradients, residuals, factors, begins, at::kCPU, &flat);
  Tensor finite = at::empty({static_cast<int64_t>(members)}, at::kBool);
  Partitioned found;
  Raise(op, AccumulatePartition(parts, {begin, end, threshold, share, sample, static_cast<uint64_t>(seed)},
                                TorchParallelFor, finite.mutable_data_ptr<bool>(), &found));
  return {FromIndices(found.indices), SketchTensor(found), at::scalar_tensor(found.threshold, at::kDouble), finite};
}

}  // namespace
}  // namespace hvd_sparse

TORCH_LIBRARY_FRAGMENT(hvd_sparse, m) {
  m.def(
      "filter_bucket(Tensor[] gradients, Tensor(a!)[] residuals, Tensor(b!)[] velocities, Tensor[] parameters, "
      "float[] factors, float momentum, bool nesterov, float[] weight_decays, bool is_active, float[] thresholds, "
      "int[] ks, str coding, str value_dtype, str level, int[] channels, int[] stages, str distribution, int seed) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "accumulate_partition(Tensor[] gradients, Tensor(a!)[] residuals, float[] factors, int[] begins, int begin, "
      "int end, float threshold, float share, int sample, int seed) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("fit_thresholds(Tensor[] residuals, int[] ks, int[] stages, str distribution, int seed) -> Tensor");
  m.def(
      "reduce_located_bucket(Tensor gathered, int[] ns, int ranks, Tensor(a!)[] outs, int[] places, float scale, "
      "str coding, str value_dtype, int[] channels) -> ()");
}

TORCH_LIBRARY_IMPL(hvd_sparse, CPU, m) {
  HVD_SPARSE_IMPL("filter_bucket", FilterBucketOp);
  HVD_SPARSE_IMPL("accumulate_partition", AccumulatePartitionOp);
  HVD_SPARSE_IMPL("fit_thresholds", FitThresholdsOp);
  HVD_SPARSE_IMPL("reduce_located_bucket", ReduceLocatedBucketOp);
}
