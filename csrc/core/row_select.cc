#include "row_select.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "mask.h"
#include "multiversion.h"
#include "row_key.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kRowGrain = int64_t{1} << 15;    // smallest number of elements for which another thread pays off
constexpr int64_t kCountChunk = int64_t{1} << 15;  // a count of this many elements fits into every BitsOf<T>

// Counts in an integer of the element's width, so that it vectorises.
template <typename T>
inline __attribute__((always_inline)) int64_t CountIn(const T* row, int64_t columns, BitsOf<T> bar) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < columns; begin += kCountChunk) {
    const int64_t end = std::min(columns, begin + kCountChunk);
    BitsOf<T> part = 0;
    for (int64_t c = begin; c < end; ++c) part = static_cast<BitsOf<T>>(part + (MagnitudeBits(row[c]) >= bar));
    count += static_cast<int64_t>(part);
  }
  return count;
}

template <typename T>
inline __attribute__((always_inline)) void MaskIn(const T* row, int64_t columns, BitsOf<T> bar, uint8_t* mask) {
  for (int64_t c = 0; c < columns; ++c) mask[c] = MagnitudeBits(row[c]) >= bar;
}

template <typename T>
inline __attribute__((always_inline)) BitsOf<T> LeastIn(const T* row, int64_t columns, BitsOf<T> bar) {
  BitsOf<T> least = kRowNanKey<T>;
  for (int64_t c = 0; c < columns; ++c) {
    const BitsOf<T> bits = MagnitudeBits(row[c]);
    const BitsOf<T> key = bits >= bar ? bits : kRowNanKey<T>;
    least = key < least ? key : least;
  }
  return least;
}

template <typename T>
inline __attribute__((always_inline)) double SumIn(const T* row, int64_t columns) {
  double lanes[kSumLanes] = {};
  int64_t c = 0;
  for (; c + kSumLanes <= columns; c += kSumLanes) {
    for (int lane = 0; lane < kSumLanes; ++lane) lanes[lane] += FiniteMagnitude(row[c + lane]);
  }
  for (int lane = 0; c < columns; ++c, ++lane) lanes[lane] += FiniteMagnitude(row[c]);
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

// CountAtLeast: the number of elements that reach the threshold `bar`, including NaN. LeastKeyAtLeast: the smallest key
// of these. MaskAtLeast: a mask of these.
#define HVD_SPARSE_ROW_LOOPS(T)                                                                           \
  HVD_SPARSE_MULTIVERSION int64_t CountAtLeast(const T* row, int64_t columns, BitsOf<T> bar) {            \
    return CountIn(row, columns, bar);                                                                    \
  }                                                                                                       \
  HVD_SPARSE_MULTIVERSION BitsOf<T> LeastKeyAtLeast(const T* row, int64_t columns, BitsOf<T> bar) {       \
    return LeastIn(row, columns, bar);                                                                    \
  }                                                                                                       \
  HVD_SPARSE_MULTIVERSION void MaskAtLeast(const T* row, int64_t columns, BitsOf<T> bar, uint8_t* mask) { \
    MaskIn(row, columns, bar, mask);                                                                      \
  }                                                                                                       \
  HVD_SPARSE_MULTIVERSION double SumMagnitudes(const T* row, int64_t columns) { return SumIn(row, columns); }

HVD_SPARSE_ROW_LOOPS(float)
HVD_SPARSE_ROW_LOOPS(double)
HVD_SPARSE_ROW_LOOPS(Float16)
HVD_SPARSE_ROW_LOOPS(BFloat16)
#undef HVD_SPARSE_ROW_LOOPS

// Searches for the threshold that exactly k elements of a row reach, by counting: a pass costs less than moving the
// data. The result of one row is the first guess for the next row. The guess changes the cost, never the result.
template <typename T>
class RowSelector {
 public:
  using M = BitsOf<T>;

  RowSelector(int64_t columns, int64_t k, uint64_t seed) : columns_(columns), k_(k), seed_(seed) {}

  // Writes the mask of a row; returns its threshold.
  double Select(const T* row, uint8_t* mask) {
    Search(row);
    MaskAtLeast(row, columns_, low_, mask);
    // If more than k elements reach low_, it is the k-th key itself, and several elements have this key.
    const M last = at_low_ == k_ ? LeastKeyAtLeast(row, columns_, low_) : low_;
    if (at_low_ > k_) CutTies(row, mask);
    guess_ = last;
    return MagnitudeOfRowKey<T>(last);
  }

 private:
  static constexpr M kTop = static_cast<M>(kRowNanKey<T> + 1);  // no key reaches it
  static constexpr M kFirstStep = static_cast<M>(sizeof(T) == 2 ? 4 : M{1} << (sizeof(T) == 4 ? 18 : 47));

  // Invariant: at least k elements reach low_, and fewer than k reach high_. Stops when exactly k elements reach low_,
  // or when no key lies between the two.
  void Search(const T* row) {
    low_ = 0, at_low_ = columns_, high_ = kTop, at_high_ = 0;
    M probe = guess_;
    M step = kFirstStep;
    for (int round = 0; at_low_ > k_ && high_ - low_ > 1; ++round) {
      probe = std::clamp(probe, static_cast<M>(low_ + 1), static_cast<M>(high_ - 1));
      const int64_t count = CountAtLeast(row, columns_, probe);
      (count >= k_ ? low_ : high_) = probe;
      (count >= k_ ? at_low_ : at_high_) = count;
      probe = NextProbe(round, &step);
    }
  }

  // Moves away from the guess in growing steps until low_ and high_ enclose the threshold. Then it interpolates between
  // them, because the logarithm of the count is almost linear. Every third step bisects, so that the search is short on
  // any data.
  M NextProbe(int round, M* step) const {
    const M width = static_cast<M>(high_ - low_);
    if (guess_ > 0 && (low_ == 0 || high_ == kTop)) {
      const M reach = std::min(*step, static_cast<M>(width - 1));
      *step = static_cast<M>(std::min<M>(*step, kTop / 4) * 2);
      return static_cast<M>(low_ == 0 ? high_ - reach : low_ + reach);
    }
    if (round % 3 == 2 || low_ == 0 || high_ == kTop) return static_cast<M>(low_ + width / 2);
    const double below = std::log(static_cast<double>(at_low_));
    const double above = std::log(static_cast<double>(at_high_) + 0.5);
    const double part = (below - std::log(static_cast<double>(k_))) / (below - above);
    return static_cast<M>(low_ + static_cast<M>(std::min(0.999, part) * static_cast<double>(width)));
  }

  // Removes elements whose key equals low_ from the mask until k are left.
  void CutTies(const T* row, uint8_t* mask) {
    ties_.clear();
    ForEachSet(mask, columns_, [&](int64_t c) {
      if (RowKey(row[c]) == low_) ties_.push_back(RowTie<T>(low_, seed_, c));
    });
    const auto last = ties_.begin() + (k_ - at_high_ - 1);
    std::nth_element(ties_.begin(), last, ties_.end());
    ForEachSet(mask, columns_, [&](int64_t c) {
      if (RowKey(row[c]) == low_ && RowTie<T>(low_, seed_, c) > *last) mask[c] = 0;
    });
  }

  int64_t columns_;
  int64_t k_;
  uint64_t seed_;
  M guess_ = 0;
  M low_ = 0;
  M high_ = 0;
  int64_t at_low_ = 0;
  int64_t at_high_ = 0;
  std::vector<uint64_t> ties_;
};

// Calls rows(data, begin, end) on ranges of rows, with the matrix' element type.
template <typename Function>
void ForRows(const Matrix& values, const ParallelFor& parallel_for, const Function& rows) {
  Dispatch(values.array(), [&](const auto* data) {
    const int64_t grain = std::max<int64_t>(1, kRowGrain / values.columns);
    parallel_for(0, values.rows, grain, [&](int64_t begin, int64_t end) { rows(data, begin, end); });
  });
}

}  // namespace

Status CheckRowCount(int64_t k, int64_t columns) {
  if (k >= 1 && k <= columns) return Status::Ok();
  return Status::InvalidArgument("k must be between 1 and the number of columns, " + std::to_string(columns) +
                                 "; got " + std::to_string(k));
}

Status SelectTopKRows(const Matrix& values, int64_t k, uint64_t seed, const ParallelFor& parallel_for, uint8_t* mask,
                      double* thresholds) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckRowCount(k, values.columns));
  ForRows(values, parallel_for, [&](const auto* data, int64_t begin, int64_t end) {
    RowSelector<std::decay_t<decltype(*data)>> selector(values.columns, k, seed);
    for (int64_t row = begin; row < end; ++row) {
      thresholds[row] = selector.Select(data + row * values.columns, mask + row * values.columns);
    }
  });
  return Status::Ok();
}

Status LaplaceFactor(double density, double* factor) {
  if (!(density > 0 && density <= 1)) {
    return Status::InvalidArgument("density must be in (0, 1], got " + std::to_string(density));
  }
  *factor = -std::log(density);
  return Status::Ok();
}

Status LaplaceThresholdRows(const Matrix& values, double density, const ParallelFor& parallel_for, double* thresholds) {
  double factor = 0;
  HVD_SPARSE_RETURN_IF_ERROR(LaplaceFactor(density, &factor));
  ForRows(values, parallel_for, [&](const auto* data, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const double total = SumMagnitudes(data + row * values.columns, values.columns);
      thresholds[row] = total / static_cast<double>(values.columns) * factor;
    }
  });
  return Status::Ok();
}

Status FilterThresholdRows(const Matrix& values, const double* thresholds, int64_t count,
                           const ParallelFor& parallel_for, uint8_t* mask) {
  if (count != 1 && count != values.rows) {
    return Status::InvalidArgument("thresholds must have 1 or " + std::to_string(values.rows) + " elements, got " +
                                   std::to_string(count));
  }
  for (int64_t i = 0; i < count; ++i) {
    if (thresholds[i] >= 0) continue;
    return Status::InvalidArgument("thresholds must be at least 0, got " + std::to_string(thresholds[i]) + " at " +
                                   std::to_string(i));
  }
  ForRows(values, parallel_for, [&](const auto* data, int64_t begin, int64_t end) {
    using T = std::decay_t<decltype(*data)>;
    for (int64_t row = begin; row < end; ++row) {
      const BitsOf<T> bar = std::max<BitsOf<T>>(1, SmallestReaching<T>(thresholds[count == 1 ? 0 : row]));
      MaskAtLeast(data + row * values.columns, values.columns, bar, mask + row * values.columns);
    }
  });
  return Status::Ok();
}

}  // namespace hvd_sparse
