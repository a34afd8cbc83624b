#include "changes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuts.h"
#include "expect.h"
#include "order.h"
#include "random.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kBlock = 65'536;
constexpr int64_t kSizes[] = {0, 1, 3, 63, 64, 65, 4095, 4097, kBlock - 1, kBlock, kBlock + 1, 2 * kBlock + 17};
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Exactly `size` values on the heap, so that AddressSanitizer sees the first one read or written past the end.
template <typename T>
class HeapArray {
 public:
  explicit HeapArray(const std::vector<T>& values) : size_(values.size()), data_(new T[values.size()]) {
    std::copy(values.begin(), values.end(), data_.get());
  }
  T* get() { return data_.get(); }
  std::vector<T> values() const { return {data_.get(), data_.get() + size_}; }

 private:
  size_t size_;
  std::unique_ptr<T[]> data_;
};

std::vector<float> DrawFloats(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<int64_t> DrawIndices(int64_t n, uint64_t one_in, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < n; ++i) {
    if (random() % one_in == 0 || i == n - 1) indices.push_back(i);
  }
  return indices;
}

TEST(AnUpdateIsSubtractedAndListed) {
  for (const int64_t n : kSizes) {
    for (const uint64_t one_in : {1, 3, 1000}) {
      const std::string where = "n " + std::to_string(n) + ", one in " + std::to_string(one_in);
      HeapArray<int64_t> indices(DrawIndices(n, one_in, 1));
      const auto count = static_cast<int64_t>(indices.values().size());
      HeapArray<float> values(DrawFloats(count, 2)), parameters(DrawFloats(n, 3));
      const auto blocks = static_cast<size_t>((n + kBlock - 1) / kBlock);
      HeapArray<uint32_t> counts(std::vector<uint32_t>(blocks, 77));
      HeapArray<uint16_t> places(std::vector<uint16_t>(static_cast<size_t>(count), 77));
      std::vector<float> expected = parameters.values();
      std::vector<uint32_t> expected_counts(blocks);
      std::vector<uint16_t> expected_places;
      for (int64_t j = 0; j < count; ++j) {
        const int64_t index = indices.get()[j];
        expected[static_cast<size_t>(index)] -= values.get()[j];
        ++expected_counts[static_cast<size_t>(index / kBlock)];
        expected_places.push_back(static_cast<uint16_t>(index % kBlock));
      }
      EXPECT_STATUS(StatusKind::kOk,
                    ApplyUpdate(indices.get(), values.get(), count, parameters.get(), n, counts.get(), places.get()),
                    where);
      EXPECT_EQ(expected, parameters.values(), where);
      EXPECT_EQ(expected_counts, counts.values(), where);
      EXPECT_EQ(expected_places, places.values(), where);
    }
  }
}

TEST(NotANumberIsSubtractedToo) {
  HeapArray<float> parameters({1, 2, 3});
  const int64_t indices[] = {0, 2};
  const float values[] = {static_cast<float>(kNan), static_cast<float>(-kInfinity)};
  uint32_t counts[1];
  uint16_t places[2];
  EXPECT_STATUS(StatusKind::kOk, ApplyUpdate(indices, values, 2, parameters.get(), 3, counts, places), "");
  EXPECT(std::isnan(parameters.get()[0]), parameters.get()[0]);
  EXPECT_EQ(2.0f, parameters.get()[1], "not in the update");
  EXPECT_EQ(static_cast<float>(kInfinity), parameters.get()[2], "");
}

TEST(IndicesOutOfRangeOrOrderChangeNothing) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t n : kSizes) {
    const int64_t last = n - 1;
    std::vector<std::vector<int64_t>> hostile{{-1}, {kLeast}, {n}, {kMost}, {kMost, kLeast}};
    if (n > 0) hostile.insert(hostile.end(), {{0, n}, {0, 0}, {last, -1}, {last, last}, {0, kMost}, {0, kLeast}});
    if (n > 2) hostile.insert(hostile.end(), {{0, 2, 1}, {1, 0, 2}, {0, 1, n}, {0, 1, last, last}});
    for (const std::vector<int64_t>& bad : hostile) {
      HeapArray<int64_t> indices(bad);
      HeapArray<float> values(std::vector<float>(bad.size(), 1)), parameters(DrawFloats(n, 3));
      HeapArray<uint32_t> counts(std::vector<uint32_t>(static_cast<size_t>((n + kBlock - 1) / kBlock), 77));
      HeapArray<uint16_t> places(std::vector<uint16_t>(bad.size(), 77));
      const std::vector<float> before = parameters.values();
      const std::vector<uint32_t> counts_before = counts.values();
      EXPECT_STATUS(StatusKind::kInvalidArgument,
                    ApplyUpdate(indices.get(), values.get(), static_cast<int64_t>(bad.size()), parameters.get(), n,
                                counts.get(), places.get()),
                    "n " << n << ", first index " << bad[0]);
      EXPECT_EQ(before, parameters.values(), "n " << n);
      EXPECT_EQ(counts_before, counts.values(), "n " << n);
      EXPECT_EQ(std::vector<uint16_t>(bad.size(), 77), places.values(), "n " << n);
    }
  }
}

// Two vectors, with equal elements, equal differences, NaN and infinities if `awkward`.
struct Pair {
  Pair(int64_t n, bool awkward) : minuend(DrawFloats(n, 4)), subtrahend(DrawFloats(n, 5)) {
    for (int64_t i = 0; awkward && i < n; ++i) {
      if (i % 3 == 0) subtrahend.get()[i] = minuend.get()[i];
      if (i % 5 == 1) minuend.get()[i] = subtrahend.get()[i] + (i % 2 == 0 ? 1.5f : -1.5f);
      if (i % 97 == 2) minuend.get()[i] = static_cast<float>(kNan);
      if (i % 499 == 4) subtrahend.get()[i] = static_cast<float>(kInfinity);
      if (i % 1009 == 4) minuend.get()[i] = static_cast<float>(kInfinity);  // infinity - infinity, too
    }
  }
  std::vector<float> Difference() const {
    std::vector<float> difference = minuend.values();
    const std::vector<float> other = subtrahend.values();
    for (size_t i = 0; i < difference.size(); ++i) difference[i] -= other[i];
    return difference;
  }

  HeapArray<float> minuend, subtrahend;
};

void CheckSelected(Pair* pair, const std::vector<float>& difference, int64_t k, uint64_t seed) {
  const auto n = static_cast<int64_t>(difference.size());
  const std::vector<int64_t> order = TotalOrder({difference.begin(), difference.end()}, seed);
  std::vector<int64_t> expected(order.begin(), order.begin() + k);
  std::sort(expected.begin(), expected.end());
  const auto last = std::fabs(static_cast<double>(difference[static_cast<size_t>(order[static_cast<size_t>(k - 1)])]));
  const double smallest = std::isnan(last) ? 0 : last;
  for (const double hint : {0.0, 1e-30, 0.9 * smallest, smallest, 1.1 * smallest, 1e9, kInfinity, kNan, -1.0}) {
    const int64_t reaching = std::count_if(difference.begin(), difference.end(), [hint](float value) {
      return std::fabs(static_cast<double>(value)) >= hint;
    });
    for (const Cut& cut : AllCuts()) {
      const std::string where =
          "n " + std::to_string(n) + ", k " + std::to_string(k) + ", hint " + std::to_string(hint) + ", " + cut.name;
      Selection selection;
      EXPECT_STATUS(
          StatusKind::kOk,
          SelectTopKOfDifference(pair->minuend.get(), pair->subtrahend.get(), n, {k, hint, seed}, cut.run, &selection),
          where);
      EXPECT_EQ(expected, selection.indices, where);
      EXPECT_EQ(smallest, selection.threshold, where);
      if (!(hint > 0 && hint < kInfinity)) continue;
      EXPECT_EQ(std::min(reaching, 2 * k), std::min(selection.passed, 2 * k), where);
    }
  }
}

TEST(TheLargestDifferencesAreSelected) {
  for (const int64_t n : kSizes) {
    for (const bool awkward : {false, true}) {
      Pair pair(n, awkward);
      const std::vector<float> difference = pair.Difference();
      std::vector<int64_t> ks{1, n / 100, n / 2 + 1, n};
      std::sort(ks.begin(), ks.end());
      ks.erase(std::unique(ks.begin(), ks.end()), ks.end());
      for (const int64_t k : ks) {
        if (k < 1 || k > n || (n > 5000 && !expect::Chosen(2))) continue;
        CheckSelected(&pair, difference, k, static_cast<uint64_t>(n));
      }
    }
  }
}

TEST(AWrongNumberOfDifferencesIsRefused) {
  for (const int64_t n : kSizes) {
    Pair pair(n, false);
    for (const int64_t k : {int64_t{0}, int64_t{-1}, n + 1, std::numeric_limits<int64_t>::min()}) {
      for (const double hint : {0.0, 1.0}) {
        Selection selection;
        EXPECT_STATUS(
            StatusKind::kInvalidArgument,
            SelectTopKOfDifference(pair.minuend.get(), pair.subtrahend.get(), n, {k, hint, 1}, SerialFor, &selection),
            "n " << n << ", k " << k);
        EXPECT(selection.indices.empty(), "nothing is selected");
      }
    }
  }
}

}  // namespace
}  // namespace hvd_sparse
