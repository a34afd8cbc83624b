#include "select.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <type_traits>

#include "multiversion.h"
#include "random.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kGrain = int64_t{1} << 18;
constexpr int64_t kChunk = 64;

template <typename T>
inline bool Reaches(BitsOf<T> magnitude, BitsOf<T> threshold) {  // NaN, above infinity, does not
  return static_cast<BitsOf<T>>(magnitude - threshold) <= static_cast<BitsOf<T>>(kInfinityBits<T> - threshold);
}

template <typename T>
inline __attribute__((always_inline)) bool AnyReaches(const T* data, int64_t n, BitsOf<T> threshold) {
  int any = 0;
  for (int64_t i = 0; i < n; ++i) any |= Reaches<T>(MagnitudeBits(data[i]), threshold);
  return any != 0;
}

// Returns the first chunk start in [begin, end) with an element that reaches the threshold, or end.
template <typename T>
inline __attribute__((always_inline)) int64_t SkipChunks(const T* data, int64_t begin, int64_t end,
                                                         BitsOf<T> threshold) {
  int64_t i = begin;
  for (; i + kChunk <= end; i += kChunk) {
    if (AnyReaches(data + i, kChunk, threshold)) return i;
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

// The candidates of one contiguous range, in index order, never many more than 2k: when that many have gathered they
// are cut back to the best k, and the bar rises to the last of them.
template <typename T>
class Candidates {
 public:
  using M = BitsOf<T>;
  struct Entry {
    M magnitude;
    int64_t index;
  };

  Candidates(int64_t k, M threshold, uint64_t seed)
      : k_(static_cast<size_t>(k)), capacity_(2 * k_ + 1024), threshold_(threshold), seed_(seed) {}

  void Scan(const T* data, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      i = Skip(data, i, end, threshold_);
      const int64_t stop = std::min(i + kChunk, end);
      for (; i < stop; ++i) Offer(MagnitudeBits(data[i]), i);
    }
  }

  void Append(const Candidates& later) {
    passed_ += later.passed_;
    entries_.insert(entries_.end(), later.entries_.begin(), later.entries_.end());
  }

  // Keeps the first k in the total order, still sorted by index.
  void Cut() {
    if (entries_.size() <= k_) return;
    std::vector<M> magnitudes(entries_.size());
    std::transform(entries_.begin(), entries_.end(), magnitudes.begin(), [](const Entry& e) { return e.magnitude; });
    std::nth_element(magnitudes.begin(), magnitudes.begin() + (k_ - 1), magnitudes.end(), std::greater<>());
    threshold_ = magnitudes[k_ - 1];
    size_t above = 0;
    std::vector<uint64_t> ties;
    for (const Entry& entry : entries_) {
      above += entry.magnitude > threshold_;
      if (entry.magnitude == threshold_) ties.push_back(HashOf(entry));
    }
    const size_t wanted = k_ - above;
    std::nth_element(ties.begin(), ties.begin() + (wanted - 1), ties.end());
    last_tie_ = ties[wanted - 1];
    entries_.erase(
        std::remove_if(entries_.begin(), entries_.end(), [this](const Entry& entry) { return !Keeps(entry); }),
        entries_.end());
  }

  const std::vector<Entry>& entries() const { return entries_; }
  int64_t passed() const { return passed_; }

 private:
  uint64_t HashOf(const Entry& entry) const { return Hash(seed_, static_cast<uint64_t>(entry.index)); }

  bool Keeps(const Entry& entry) const {
    return entry.magnitude > threshold_ || (entry.magnitude == threshold_ && HashOf(entry) <= last_tie_);
  }

  void Offer(M magnitude, int64_t index) {
    if (!Reaches<T>(magnitude, threshold_)) return;
    ++passed_;
    const Entry entry{magnitude, index};
    if (!Keeps(entry)) return;
    entries_.push_back(entry);
    if (entries_.size() >= capacity_) Cut();
  }

  size_t k_;
  size_t capacity_;
  M threshold_;
  uint64_t seed_;
  uint64_t last_tie_ = std::numeric_limits<uint64_t>::max();
  std::vector<Entry> entries_;
  int64_t passed_ = 0;
};

// Scans all of the data against one threshold, a Candidates a range, joined in index order.
template <typename T>
Candidates<T> Gather(const T* data, int64_t n, int64_t k, BitsOf<T> threshold, uint64_t seed,
                     const ParallelFor& parallel_for) {
  std::mutex mutex;
  std::vector<std::pair<int64_t, Candidates<T>>> parts;
  parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    Candidates<T> part(k, threshold, seed);
    part.Scan(data, begin, end);
    std::lock_guard<std::mutex> lock(mutex);
    parts.emplace_back(begin, std::move(part));
  });
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  Candidates<T> all = std::move(parts.front().second);
  for (size_t i = 1; i < parts.size(); ++i) all.Append(parts[i].second);
  return all;
}

// Fewer than k elements are non-zero numbers: the rest are zeros, then NaN, lowest index first.
template <typename T>
void FillWithZeros(const T* data, int64_t n, int64_t k, std::vector<int64_t>* indices) {
  for (const bool want_nan : {false, true}) {
    for (int64_t i = 0; i < n && static_cast<int64_t>(indices->size()) < k; ++i) {
      const auto magnitude = MagnitudeBits(data[i]);
      if (want_nan ? magnitude > kInfinityBits<T> : magnitude == 0) indices->push_back(i);
    }
  }
  std::sort(indices->begin(), indices->end());
}

template <typename T>
Status SelectTopKOf(const T* data, const Array& values, const SelectParams& params, const ParallelFor& parallel_for,
                    Selection* selection) {
  using M = BitsOf<T>;
  const int64_t n = values.size;
  // Aim a quarter over k: passing too many costs little, passing too few costs another pass.
  const ThresholdParams sampled{std::min(n, params.k + params.k / 4 + 16), ThresholdMethod::kSampled, 0.005,
                                params.seed};
  const ThresholdParams exact{params.k, ThresholdMethod::kExact, 1.0, params.seed};
  const bool hinted = params.threshold_hint > 0 && params.threshold_hint < std::numeric_limits<double>::infinity();
  std::vector<const ThresholdParams*> attempts{&sampled, &exact};
  if (hinted) attempts.insert(attempts.begin(), nullptr);
  double threshold = params.threshold_hint;
  for (const ThresholdParams* attempt : attempts) {
    if (attempt != nullptr) HVD_SPARSE_RETURN_IF_ERROR(SelectThreshold(values, *attempt, parallel_for, &threshold));
    const M bar = std::max<M>(1, SmallestReaching<T>(threshold));  // zeros are never candidates
    auto candidates = Gather<T>(data, n, params.k, bar, params.seed, parallel_for);
    if (attempt == attempts.front()) selection->passed = candidates.passed();
    const bool enough = static_cast<int64_t>(candidates.entries().size()) >= params.k;
    if (!enough && attempt != &exact) continue;
    candidates.Cut();
    M smallest = kInfinityBits<T>;
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

}  // namespace

Status SelectTopK(const Array& values, const SelectParams& params, const ParallelFor& parallel_for,
                  Selection* selection) {
  if (params.k < 1 || params.k > values.size) {
    return Status::InvalidArgument("k must be in [1, " + std::to_string(values.size) + "], the number of values; got " +
                                   std::to_string(params.k));
  }
  selection->indices.clear();
  selection->indices.reserve(static_cast<size_t>(params.k));
  return Dispatch(values,
                  [&](const auto* data) { return SelectTopKOf(data, values, params, parallel_for, selection); });
}

Status FilterThreshold(const Array& values, double threshold, const ParallelFor& parallel_for,
                       std::vector<int64_t>* indices) {
  if (!(threshold >= 0)) {
    return Status::InvalidArgument("threshold must be a number >= 0, got " + std::to_string(threshold));
  }
  indices->clear();
  std::mutex mutex;
  std::vector<std::vector<int64_t>> parts;
  Dispatch(values, [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    const BitsOf<T> bar = SmallestReaching<T>(threshold);
    parallel_for(0, values.size, kGrain, [&](int64_t begin, int64_t end) {
      std::vector<int64_t> part;
      for (int64_t i = begin; i < end; ++i) {
        if (Reaches<T>(MagnitudeBits(data[i]), bar)) part.push_back(i);
      }
      std::lock_guard<std::mutex> lock(mutex);
      if (!part.empty()) parts.push_back(std::move(part));
    });
  });
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.front() < b.front(); });
  for (const auto& part : parts) indices->insert(indices->end(), part.begin(), part.end());
  return Status::Ok();
}

}  // namespace hvd_sparse
