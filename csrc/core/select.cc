#include "select.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "candidates.h"
#include "multiversion.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

// Returns the first chunk start in [begin, end) with an element that reaches the threshold, or end.
template <typename T>
inline __attribute__((always_inline)) int64_t SkipChunks(const T* data, int64_t begin, int64_t end,
                                                         BitsOf<T> threshold) {
  int64_t i = begin;
  for (; i + kTested <= end; i += kTested) {
    if (AnyReaches(data + i, kTested, threshold)) return i;
  }
  return i;
}

HVD_SPARSE_MULTIVERSION int64_t Skip(const float* data, int64_t begin, int64_t end, uint32_t threshold) {
  return SkipChunks(data, begin, end, threshold);
}
HVD_SPARSE_MULTIVERSION int64_t Skip(const double* data, int64_t begin, int64_t end, uint64_t threshold) {
  return SkipChunks(data, begin, end, threshold);
}
HVD_SPARSE_MULTIVERSION int64_t Skip(const Float16* data, int64_t begin, int64_t end, uint16_t threshold) {
  return SkipChunks(data, begin, end, threshold);
}
HVD_SPARSE_MULTIVERSION int64_t Skip(const BFloat16* data, int64_t begin, int64_t end, uint16_t threshold) {
  return SkipChunks(data, begin, end, threshold);
}

// Passes the chunks in which an element reaches the sink's threshold to the sink, which is Candidates or Passed.
template <typename T, typename Sink>
void ScanRange(const T* data, int64_t begin, int64_t end, Sink* sink) {
  for (int64_t i = begin; i < end;) {
    i = Skip(data, i, end, sink->threshold());
    const int64_t stop = std::min(i + kTested, end);
    sink->Offer(data, i, stop);
    i = stop;
  }
}

// Adds zeros, then NaN, by ascending index, until there are k indices.
template <typename T>
void FillWithZeros(const T* data, int64_t n, int64_t k, std::vector<int64_t>* indices) {
  for (const bool want_nan : {false, true}) {
    const auto before = static_cast<std::ptrdiff_t>(indices->size());
    for (int64_t i = 0; i < n && static_cast<int64_t>(indices->size()) < k; ++i) {
      const auto magnitude = MagnitudeBits(data[i]);
      if (want_nan ? magnitude > kInfinityBits<T> : magnitude == 0) indices->push_back(i);
    }
    std::inplace_merge(indices->begin(), indices->begin() + before, indices->end());
  }
}

// Takes up to three passes with ever lower bars: the hint's, whose elements the caller may have gathered already, a
// sampled one, and the exact one. The first that finds k candidates decides, or whose bar no nonzero element misses.
template <typename T>
Status SelectTopKOf(const T* data, const Array& values, const SelectParams& params, const ParallelFor& parallel_for,
                    std::optional<Candidates<T>> gathered, Selection* selection) {
  const int64_t n = values.size;
  // The sampled threshold aims at 1.25 k elements: too many cost little, too few cost another pass.
  const ThresholdParams sampled{std::min(n, params.k + params.k / 4 + 16), ThresholdMethod::kSampled, 0.005,
                                params.seed};
  const ThresholdParams exact{params.k, ThresholdMethod::kExact, 1.0, params.seed};
  const ThresholdParams* const attempts[] = {nullptr, &sampled, &exact};  // null: the hint
  const size_t first = HasHint(params) ? 0 : 1;
  double threshold = params.threshold_hint;
  for (size_t i = first; i < std::size(attempts); ++i) {
    const ThresholdParams* attempt = attempts[i];
    if (attempt != nullptr) HVD_SPARSE_RETURN_IF_ERROR(SelectThreshold(values, *attempt, parallel_for, &threshold));
    if (attempt != nullptr || !gathered) {
      const Candidates<T> none(params.k, CandidateBar<T>(threshold), params.seed);
      gathered = Gather(n, none, parallel_for,
                        [data](Candidates<T>* part, int64_t begin, int64_t end) { ScanRange(data, begin, end, part); });
    }
    Candidates<T>& candidates = *gathered;
    if (i == first) selection->passed = candidates.passed();
    const bool enough = static_cast<int64_t>(candidates.entries().size()) >= params.k;
    const bool has_all_nonzero = CandidateBar<T>(threshold) == 1;
    if (!enough && !has_all_nonzero && attempt != &exact) continue;
    candidates.Cut();
    BitsOf<T> smallest = kInfinityBits<T>;
    for (const auto& entry : candidates.entries()) {
      selection->indices.push_back(entry.index);
      smallest = std::min(smallest, entry.magnitude);
    }
    selection->threshold = enough ? MagnitudeFromBits(T{}, smallest) : 0.0;
    if (!enough) FillWithZeros(data, n, params.k, &selection->indices);
    break;
  }
  return Status::Ok();
}

void Empty(int64_t k, Selection* selection) {
  selection->indices.clear();
  selection->indices.reserve(static_cast<size_t>(k));
}

template <typename T>
inline __attribute__((always_inline)) void Mark(const T* data, int64_t n, BitsOf<T> threshold, uint8_t* marks) {
  for (int64_t i = 0; i < n; ++i) marks[i] = Reaches<T>(MagnitudeBits(data[i]), threshold);
}

HVD_SPARSE_MULTIVERSION void MarkIn(const float* data, int64_t n, uint32_t threshold, uint8_t* marks) {
  Mark(data, n, threshold, marks);
}
HVD_SPARSE_MULTIVERSION void MarkIn(const double* data, int64_t n, uint64_t threshold, uint8_t* marks) {
  Mark(data, n, threshold, marks);
}
HVD_SPARSE_MULTIVERSION void MarkIn(const Float16* data, int64_t n, uint16_t threshold, uint8_t* marks) {
  Mark(data, n, threshold, marks);
}
HVD_SPARSE_MULTIVERSION void MarkIn(const BFloat16* data, int64_t n, uint16_t threshold, uint8_t* marks) {
  Mark(data, n, threshold, marks);
}

HVD_SPARSE_MULTIVERSION int64_t NumberIn(const float* data, int64_t n, uint32_t threshold) {
  constexpr int64_t kPart = 1 << 16;  // counted in 32 bits, of which a vector has twice as many as of 64
  int64_t total = 0;
  for (int64_t i = 0; i < n;) {
    const int64_t end = i + kPart < n ? i + kPart : n;
    int32_t count = 0;
    for (; i < end; ++i) count += Reaches<float>(MagnitudeBits(data[i]), threshold) ? 1 : 0;
    total += count;
  }
  return total;
}

}  // namespace

void MarkReaching(const float* data, int64_t n, uint32_t threshold, uint8_t* marks) {
  MarkIn(data, n, threshold, marks);
}
void MarkReaching(const double* data, int64_t n, uint64_t threshold, uint8_t* marks) {
  MarkIn(data, n, threshold, marks);
}
void MarkReaching(const Float16* data, int64_t n, uint16_t threshold, uint8_t* marks) {
  MarkIn(data, n, threshold, marks);
}
void MarkReaching(const BFloat16* data, int64_t n, uint16_t threshold, uint8_t* marks) {
  MarkIn(data, n, threshold, marks);
}

int64_t NumberReaching(const float* data, int64_t n, uint32_t threshold) { return NumberIn(data, n, threshold); }

Status SelectTopK(const Array& values, const SelectParams& params, const ParallelFor& parallel_for,
                  Selection* selection) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckCount(params.k, values.size));
  Empty(params.k, selection);
  return Dispatch(values, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    return SelectTopKOf<T>(data, values, params, parallel_for, std::nullopt, selection);
  });
}

Status SelectTopKAmong(Candidates<float> gathered, const Array& values, const SelectParams& params,
                       const ParallelFor& parallel_for, Selection* selection) {
  Empty(params.k, selection);
  return SelectTopKOf<float>(static_cast<const float*>(values.data), values, params, parallel_for, std::move(gathered),
                             selection);
}

Status FilterThreshold(const Array& values, double threshold, const ParallelFor& parallel_for,
                       std::vector<int64_t>* indices) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckThreshold(threshold));
  Dispatch(values, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    const Passed<T> none(SmallestReaching<T>(threshold));
    auto passed = Gather(values.size, none, parallel_for,
                         [data](Passed<T>* part, int64_t begin, int64_t end) { ScanRange(data, begin, end, part); });
    *indices = std::move(passed.indices());
  });
  return Status::Ok();
}

}  // namespace hvd_sparse
