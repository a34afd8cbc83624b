// Containers that gather the elements that reach a threshold in one pass over the data. All selections use them.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "byte_mask.h"
#include "dtype.h"
#include "parallel.h"
#include "random.h"
#include "select.h"

namespace hvd_sparse {

constexpr int64_t kTested = 64;  // elements that are tested together

template <typename T>
inline bool Reaches(BitsOf<T> magnitude, BitsOf<T> threshold) {  // false for NaN, whose bits are above infinity
  return static_cast<BitsOf<T>>(magnitude - threshold) <= static_cast<BitsOf<T>>(kInfinityBits<T> - threshold);
}

template <typename T>
inline __attribute__((always_inline)) bool AnyReaches(const T* data, int64_t n, BitsOf<T> threshold) {
  int any = 0;
  for (int64_t i = 0; i < n; ++i) any |= Reaches<T>(MagnitudeBits(data[i]), threshold);
  return any != 0;
}

// Sets marks[i] to 1 if data[i] reaches the threshold, else to 0.
void MarkReaching(const float* data, int64_t n, uint32_t threshold, uint8_t* marks);
void MarkReaching(const double* data, int64_t n, uint64_t threshold, uint8_t* marks);
void MarkReaching(const Float16* data, int64_t n, uint16_t threshold, uint8_t* marks);
void MarkReaching(const BFloat16* data, int64_t n, uint16_t threshold, uint8_t* marks);

// Returns the number of elements that reach the threshold.
int64_t NumberReaching(const float* data, int64_t n, uint32_t threshold);

// Calls function(i) in ascending order for each i in [begin, end), at most one chunk, whose element reaches the
// threshold.
template <typename T, typename Function>
inline void ForEachReaching(const T* data, int64_t begin, int64_t end, BitsOf<T> threshold, Function&& function) {
  uint8_t marks[kTested];
  MarkReaching(data + begin, end - begin, threshold, marks);
  ForEachSet(marks, end - begin, [&](int64_t i) { function(begin + i); });
}

// The candidates of one contiguous range, in index order. When their number reaches about 2k, they are reduced to the
// k largest, and the threshold rises to the smallest of these.
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

  // Sets the offset that is added to the indices passed to Offer.
  void SetBase(int64_t base) { base_ = base; }

  // Adds the elements of data[begin, end), at most one chunk, that reach the threshold.
  void Offer(const T* data, int64_t begin, int64_t end) {
    ForEachReaching(data, begin, end, threshold_, [&](int64_t i) { OfferOne(MagnitudeBits(data[i]), i); });
  }

  void Append(const Candidates& later) {
    passed_ += later.passed_;
    entries_.insert(entries_.end(), later.entries_.begin(), later.entries_.end());
  }

  // Keeps the first k in the total order of SelectTopK, sorted by index.
  void Cut() { CutTo(k_); }

  // The same for another number, 0 < k.
  void CutTo(size_t k) {
    if (entries_.size() <= k) return;
    std::vector<M> magnitudes(entries_.size());
    std::transform(entries_.begin(), entries_.end(), magnitudes.begin(), [](const Entry& e) { return e.magnitude; });
    std::nth_element(magnitudes.begin(), magnitudes.begin() + (k - 1), magnitudes.end(), std::greater<>());
    threshold_ = magnitudes[k - 1];
    size_t above = 0;
    std::vector<uint64_t> ties;
    for (const Entry& entry : entries_) {
      above += entry.magnitude > threshold_;
      if (entry.magnitude == threshold_) ties.push_back(HashOf(entry));
    }
    const size_t wanted = k - above;
    std::nth_element(ties.begin(), ties.begin() + (wanted - 1), ties.end());
    largest_tie_ = ties[wanted - 1];
    entries_.erase(
        std::remove_if(entries_.begin(), entries_.end(), [this](const Entry& entry) { return !Keeps(entry); }),
        entries_.end());
  }

  M threshold() const { return threshold_; }
  const std::vector<Entry>& entries() const { return entries_; }
  int64_t passed() const { return passed_; }

 private:
  uint64_t HashOf(const Entry& entry) const { return Hash(seed_, static_cast<uint64_t>(entry.index)); }

  // Returns whether an entry can still be among the first k: of those whose magnitude equals the threshold, only the
  // ones up to the largest hash of a tie can.
  bool Keeps(const Entry& entry) const {
    return entry.magnitude > threshold_ || (entry.magnitude == threshold_ && HashOf(entry) <= largest_tie_);
  }

  void OfferOne(M magnitude, int64_t index) {
    if (!Reaches<T>(magnitude, threshold_)) return;
    ++passed_;
    const Entry entry{magnitude, base_ + index};
    if (!Keeps(entry)) return;
    if (entries_.empty()) entries_.reserve(std::min(capacity_, k_ + k_ / 2 + 16));  // enough if the hint is good
    entries_.push_back(entry);
    if (entries_.size() >= capacity_) Cut();
  }

  size_t k_;
  size_t capacity_;
  M threshold_;
  uint64_t seed_;
  int64_t base_ = 0;
  uint64_t largest_tie_ = std::numeric_limits<uint64_t>::max();
  std::vector<Entry> entries_;
  int64_t passed_ = 0;
};

// All elements that reach a threshold in one contiguous range, in index order.
template <typename T>
class Passed {
 public:
  explicit Passed(BitsOf<T> threshold) : threshold_(threshold) {}

  // Adds the elements of data[begin, end), at most one chunk, that reach the threshold.
  void Offer(const T* data, int64_t begin, int64_t end) {
    ForEachReaching(data, begin, end, threshold_, [&](int64_t i) { indices_.push_back(i); });
  }

  void Append(const Passed& later) { indices_.insert(indices_.end(), later.indices_.begin(), later.indices_.end()); }

  BitsOf<T> threshold() const { return threshold_; }
  std::vector<int64_t>& indices() { return indices_; }

 private:
  BitsOf<T> threshold_;
  std::vector<int64_t> indices_;
};

// Calls scan(&sink, begin, end) on ranges that cover [0, n), each with a copy of the empty sink `none`, and joins the
// sinks in index order.
template <typename Sink, typename Scan>
Sink Gather(int64_t n, const Sink& none, const ParallelFor& parallel_for, const Scan& scan) {
  std::mutex mutex;
  std::vector<std::pair<int64_t, Sink>> parts;
  parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    Sink part = none;
    scan(&part, begin, end);
    std::lock_guard<std::mutex> lock(mutex);
    parts.emplace_back(begin, std::move(part));
  });
  if (parts.empty()) return none;
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  Sink all = std::move(parts.front().second);
  for (size_t i = 1; i < parts.size(); ++i) all.Append(parts[i].second);
  return all;
}

// The smallest magnitude, as bits, of a candidate for a threshold. Zeros are never candidates.
template <typename T>
BitsOf<T> CandidateBar(double threshold) {
  return std::max<BitsOf<T>>(1, SmallestReaching<T>(threshold));
}

inline bool HasHint(const SelectParams& params) {
  return params.threshold_hint > 0 && params.threshold_hint < std::numeric_limits<double>::infinity();
}

// SelectTopK of float32 values, when the elements that reach the hint have already been gathered.
Status SelectTopKAmong(Candidates<float> gathered, const Array& values, const SelectParams& params,
                       const ParallelFor& parallel_for, Selection* selection);

}  // namespace hvd_sparse
