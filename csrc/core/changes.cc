#include "changes.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "candidates.h"
#include "multiversion.h"
#include "run_length.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kSpan = 4096;  // elements per subtraction, few enough for the L1 cache
constexpr int64_t kAhead = 48;   // prefetch distance, in entries: each is in another cache line

HVD_SPARSE_MULTIVERSION void Subtract(const float* minuend, const float* subtrahend, int64_t n, float* difference) {
  for (int64_t i = 0; i < n; ++i) difference[i] = minuend[i] - subtrahend[i];
}

// Skips chunks in which nothing reaches the threshold, like AccumulateTopK.
HVD_SPARSE_MULTIVERSION void OfferChunks(const float* difference, int64_t n, Candidates<float>* candidates) {
  for (int64_t i = 0; i < n; i += kTested) {
    const int64_t count = std::min(kTested, n - i);
    if (AnyReaches(difference + i, count, candidates->threshold())) candidates->Offer(difference, i, i + count);
  }
}

}  // namespace

Status ApplyUpdate(const int64_t* indices, const float* values, int64_t count, float* parameters, int64_t n,
                   uint32_t* counts, uint16_t* places) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckAscending(indices, count, n));
  int64_t j = 0;
  for (int64_t block = 0; block < BlockCount(n); ++block) {
    const int64_t first = j;
    for (const int64_t end = (block + 1) * kBlock; j < count && indices[j] < end; ++j) {
      if (j + kAhead < count) __builtin_prefetch(parameters + indices[j + kAhead], 1);
      parameters[indices[j]] -= values[j];
      places[j] = static_cast<uint16_t>(indices[j]);  // modulo kBlock
    }
    counts[block] = static_cast<uint32_t>(j - first);
  }
  return Status::Ok();
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
