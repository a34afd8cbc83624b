#include "bucket.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

#include "finite.h"
#include "hint.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

constexpr double kFitMargin = 0.97;    // elements above this fraction of the guessed threshold are gathered
constexpr int64_t kFitSpan = 1 << 20;  // elements that are accumulated before their part of the sample is read
constexpr int64_t kAhead = 32;         // prefetch distance, in entries: each is in another cache line

// Returns the residuals at ascending indices, with zeros where there is no part.
std::vector<float> ResidualsAt(const std::vector<Part>& parts, const std::vector<int64_t>& indices) {
  std::vector<float> values;
  values.reserve(indices.size());
  auto part = parts.begin();
  for (const int64_t index : indices) {
    while (part != parts.end() && part->begin + part->gradient.size <= index) ++part;
    const bool found = part != parts.end() && part->begin <= index;
    values.push_back(found ? part->feedback.residual[index - part->begin] : 0.0f);
  }
  return values;
}

// Selects from the stored residuals, without adding the gradients.
Status SelectStored(const std::vector<Part>& parts, int64_t n, const SelectParams& select,
                    const ParallelFor& parallel_for, bool* finite, Selection* selection) {
  for (size_t i = 0; i < parts.size(); ++i) finite[i] = AllFinite(parts[i].gradient, parallel_for);
  std::vector<float> copy;
  return SelectTopK({JoinResiduals(parts, n, &copy), n, DType::kFloat32}, select, parallel_for, selection);
}

// Packs the residuals at the indices.
Status PackSelected(const std::vector<Part>& parts, const std::vector<int64_t>& indices, const PayloadFormat& format,
                    Level level, uint8_t* payload) {
  const auto entries = static_cast<int64_t>(indices.size());
  std::vector<float> values = ResidualsAt(parts, indices);
  if (IsLowBit(format.dtype)) {
    HVD_SPARSE_RETURN_IF_ERROR(
        QuantizeLowBit(values.data(), indices.data(), entries, format.dtype, level, format.segments, values.data()));
  }
  const bool is_wide = format.dtype == DType::kFloat64;  // Pack expects float64 values for this type
  const std::vector<double> wide(values.begin(), is_wide ? values.end() : values.begin());
  const void* sent = values.data();
  if (is_wide) sent = wide.data();
  return Pack(format, indices.data(), sent, entries, payload);
}

// Updates the error feedback unless `is_done`, and selects the elements that reach the threshold. A given threshold
// needs one pass. If only k is given, SelectTopK finds the threshold faster than a sort or a histogram would, but it
// leaves out ties, so a second pass follows.
Status FilterFeedback(const Part& part, bool is_done, const FilterParams& filter, const ParallelFor& parallel_for,
                      bool* finite, double* threshold, std::vector<int64_t>* indices) {
  const Array residual{part.feedback.residual, part.gradient.size, DType::kFloat32};
  *threshold = filter.threshold;
  if (filter.kind == FilterKind::kThreshold) {
    if (is_done) return FilterThreshold(residual, *threshold, parallel_for, indices);
    return AccumulateFilter(part.gradient, part.params, *threshold, parallel_for, part.feedback, finite, indices);
  }
  const SelectParams select{filter.k, kFirstMargin * filter.threshold, 0};
  Selection largest;
  HVD_SPARSE_RETURN_IF_ERROR(is_done ? SelectTopK(residual, select, parallel_for, &largest)
                                     : AccumulateTopK({part}, residual.size, select, parallel_for, finite, &largest));
  *threshold = std::max(largest.threshold, kSmallestFloat);
  if (filter.kind == FilterKind::kWithTies) return FilterThreshold(residual, *threshold, parallel_for, indices);
  const float* values = part.feedback.residual;
  std::copy_if(largest.indices.begin(), largest.indices.end(), std::back_inserter(*indices),
               [values](int64_t index) { return values[index] != 0; });
  return Status::Ok();
}

// Updates the error feedback if `active`, fits a threshold to the residual, and selects the elements that reach it. If
// the guess at the threshold was good, one pass suffices.
Status FilterFitted(const Part& part, bool active, FilterParams filter, const ParallelFor& parallel_for, bool* finite,
                    double* threshold, std::vector<int64_t>* indices) {
  const int64_t n = part.gradient.size;
  const double bar = kFitMargin * filter.threshold;
  const bool guesses = active && bar > 0 && bar < HUGE_VAL;
  const float* residual = part.feedback.residual;
  static thread_local FitScratch scratch;  // kept from one tensor and step to the next
  FitSample sample(n, filter.k, filter.fit, &scratch);
  *finite = active || *finite;  // if active, the loop finds it; else the caller has
  for (int64_t begin = 0; active && begin < n; begin += kFitSpan) {
    const Part span = CutPart(part, begin, begin + kFitSpan);
    bool is_finite = true;
    if (guesses) {
      std::vector<int64_t> found;
      HVD_SPARSE_RETURN_IF_ERROR(
          AccumulateFilter(span.gradient, span.params, bar, parallel_for, span.feedback, &is_finite, &found));
      for (const int64_t index : found) indices->push_back(begin + index);
    } else {
      is_finite = Accumulate(span.gradient, span.params, parallel_for, span.feedback);
    }
    *finite &= is_finite;
    sample.Read(residual, begin + span.gradient.size);
  }
  const Fit fit = sample.Run(residual);
  *threshold = fit.threshold;
  if (guesses && !fit.is_misfit && fit.threshold >= bar) {
    const uint32_t least = SmallestReaching<float>(fit.threshold);
    size_t kept = 0;
    for (const int64_t index : *indices) {  // without a branch: the next values are loaded while one is waited for
      (*indices)[kept] = index;
      kept += MagnitudeBits(residual[index]) >= least;
    }
    indices->resize(kept);
    return Status::Ok();
  }
  indices->clear();
  filter.threshold = fit.is_misfit ? 0 : fit.threshold;
  filter.kind = fit.is_misfit ? FilterKind::kExactly : FilterKind::kThreshold;
  return FilterFeedback(part, true, filter, parallel_for, finite, threshold, indices);
}

}  // namespace

Status AccumulateAndPack(const std::vector<Part>& parts, bool active, SelectParams select, const PayloadFormat& format,
                         Level level, const ParallelFor& parallel_for, uint8_t* payload, bool* finite,
                         Selection* selection) {
  int64_t size = 0;
  select.k = format.k;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));  // an invalid format must change nothing
  HVD_SPARSE_RETURN_IF_ERROR(active ? AccumulateTopK(parts, format.n, select, parallel_for, finite, selection)
                                    : SelectStored(parts, format.n, select, parallel_for, finite, selection));
  const std::vector<int64_t> indices = std::move(selection->indices);
  return PackSelected(parts, indices, format, level, payload);
}

FilterParams MakeFilter(double threshold, int64_t k, const FitParams& fit) {
  const FilterKind chosen = k == 0 ? FilterKind::kThreshold : FilterKind::kWithTies;
  return {fit.stages > 0 ? FilterKind::kFitted : chosen, threshold, k, fit};
}

Status CheckFilter(const Part& part, const FilterParams& filter, PayloadFormat format) {
  int64_t size = 0;
  format.n = part.gradient.size;
  format.k = 1;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  if (filter.fit.stages < 0) {
    return Status::InvalidArgument("stages must be >= 0, got " + std::to_string(filter.fit.stages));
  }
  if (filter.kind == FilterKind::kThreshold) return CheckThreshold(filter.threshold);
  HVD_SPARSE_RETURN_IF_ERROR(CheckCount(filter.k, format.n));
  if (filter.kind != FilterKind::kFitted) return Status::Ok();
  if (part.params.rule != AccumulateRule::kResidual || part.params.weight_decay != 0) {
    return Status::InvalidArgument("a threshold is fitted where there is neither momentum nor weight decay");
  }
  return Status::Ok();
}

Status FilterAndPack(const Part& part, bool active, const FilterParams& filter, PayloadFormat format, Level level,
                     const ParallelFor& parallel_for, std::vector<uint8_t>* message, bool* finite, Filtered* filtered) {
  std::vector<int64_t> indices;
  int64_t size = 0;
  HVD_SPARSE_RETURN_IF_ERROR(CheckFilter(part, filter, format));  // wrong arguments must change nothing
  if (!active) *finite = AllFinite(part.gradient, parallel_for);
  HVD_SPARSE_RETURN_IF_ERROR(
      filter.kind == FilterKind::kFitted
          ? FilterFitted(part, active, filter, parallel_for, finite, &filtered->threshold, &indices)
          : FilterFeedback(part, !active, filter, parallel_for, finite, &filtered->threshold, &indices));
  filtered->count = static_cast<int64_t>(indices.size());
  format.n = part.gradient.size;
  format.k = std::max<int64_t>(1, filtered->count);
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  const size_t begin = message->size();
  message->resize(begin + static_cast<size_t>(size));
  return PackSelected({part}, indices, format, level, message->data() + begin);
}

Status ClearSent(const PayloadFormat& format, const uint8_t* payload, const std::vector<FeedbackSlice>& slices,
                 float retained) {
  int64_t size = 0;
  PayloadView view;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  std::vector<int64_t> indices;
  HVD_SPARSE_RETURN_IF_ERROR(ValidateIndices(format, payload, size, &view, &indices));
  auto slice = slices.begin();
  for (int64_t j = 0; j < view.entries; ++j) {
    const int64_t index = indices[static_cast<size_t>(j)];
    while (slice != slices.end() && slice->begin + slice->size <= index) ++slice;
    if (slice == slices.end()) break;
    if (j + kAhead < view.entries) {
      const int64_t next = indices[static_cast<size_t>(j + kAhead)] - slice->begin;
      if (next >= 0 && next < slice->size) {
        __builtin_prefetch(slice->feedback.residual + next, 1);
        if (slice->feedback.velocity != nullptr) __builtin_prefetch(slice->feedback.velocity + next, 1);
      }
    }
    if (index < slice->begin) continue;
    float* residual = slice->feedback.residual + (index - slice->begin);
    const float sent = ValueAt(view, format.dtype, j);
    *residual = format.dtype == DType::kFloat32 ? 0.0f : *residual - sent;
    if (retained != 0) *residual += retained * sent;
    if (slice->feedback.velocity != nullptr) slice->feedback.velocity[index - slice->begin] = 0.0f;
  }
  return Status::Ok();
}

}  // namespace hvd_sparse
