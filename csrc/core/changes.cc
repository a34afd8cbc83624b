#include "changes.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "candidates.h"
#include "mask.h"
#include "multiversion.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kSpan = 4096;  // elements that are compared, or subtracted, at a time: they stay in a cache

HVD_SPARSE_MULTIVERSION void CompareClocks(const uint32_t* clocks, int64_t n, uint32_t after, uint8_t* above) {
  for (int64_t i = 0; i < n; ++i) above[i] = clocks[i] > after;
}

HVD_SPARSE_MULTIVERSION void Subtract(const float* minuend, const float* subtrahend, int64_t n, float* difference) {
  for (int64_t i = 0; i < n; ++i) difference[i] = minuend[i] - subtrahend[i];
}

// As AccumulateTopK does: a chunk without anything that reaches the bar is passed over.
HVD_SPARSE_MULTIVERSION void OfferChunks(const float* difference, int64_t n, Candidates<float>* candidates) {
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i);
    if (AnyReaches(difference + i, count, candidates->threshold())) candidates->Offer(difference, i, i + count);
  }
}

}  // namespace

Status ApplyUpdate(const int64_t* indices, const float* values, int64_t count, uint32_t clock,
                   const Elements& elements) {
  for (int64_t j = 0; j < count; ++j) {
    if (indices[j] < 0 || indices[j] >= elements.n) {
      return Status::InvalidArgument("indices must be in [0, " + std::to_string(elements.n) + "), got " +
                                     std::to_string(indices[j]));
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    elements.parameters[indices[j]] -= values[j];
    elements.clocks[indices[j]] = clock;
  }
  return Status::Ok();
}

int64_t ChangedAfter(const uint32_t* clocks, int64_t n, uint32_t after, int64_t* indices) {
  std::array<uint8_t, kSpan> above;
  int64_t count = 0;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t size = std::min(kSpan, n - begin);
    CompareClocks(clocks + begin, size, after, above.data());
    ForEachKept(above.data(), size, [&](int64_t i) { indices[count++] = begin + i; });
  }
  return count;
}

Status SelectTopKOfDifference(const float* minuend, const float* subtrahend, int64_t n, const SelectParams& params,
                              const ParallelFor& parallel_for, Selection* selection) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckCount(params.k, n));
  std::vector<float> whole;
  Array difference{nullptr, n, DType::kFloat32};
  const auto subtract_all = [&] {
    whole.resize(static_cast<size_t>(n));
    Subtract(minuend, subtrahend, n, whole.data());
    difference.data = whole.data();
  };
  if (!HasHint(params)) {
    subtract_all();
    return SelectTopK(difference, params, parallel_for, selection);
  }
  const Candidates<float> none(params.k, CandidateBar<float>(params.threshold_hint), params.seed);
  auto gathered = Gather(n, none, parallel_for, [&](Candidates<float>* candidates, int64_t begin, int64_t end) {
    std::array<float, kSpan> span;
    for (int64_t i = begin; i < end; i += kSpan) {
      const int64_t size = std::min(kSpan, end - i);
      Subtract(minuend + i, subtrahend + i, size, span.data());
      candidates->SetBase(i);
      OfferChunks(span.data(), size, candidates);
    }
  });
  if (static_cast<int64_t>(gathered.entries().size()) < params.k) subtract_all();
  return SelectTopKAmong(std::move(gathered), difference, params, parallel_for, selection);
}

}  // namespace hvd_sparse
