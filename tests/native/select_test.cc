#include "select.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "arrays.h"
#include "cuts.h"
#include "expect.h"
#include "order.h"
#include "random.h"

#if defined(__SSE3__) || defined(__x86_64__)
#include <pmmintrin.h>
#endif

namespace hvd_sparse {
namespace {

std::vector<int64_t> OrderOf(const Values& values, uint64_t seed) {
  std::vector<double> magnitudes;
  for (int64_t i = 0; i < values.size(); ++i) magnitudes.push_back(values.Magnitude(i));
  return TotalOrder(magnitudes, seed);
}

std::vector<int64_t> FirstSorted(const std::vector<int64_t>& order, int64_t k) {
  std::vector<int64_t> first(order.begin(), order.begin() + k);
  std::sort(first.begin(), first.end());
  return first;
}

// Largest first in the total order, zeros and NaN last: those who reach a hint come first.
int64_t CountReaching(const Values& values, const std::vector<int64_t>& order, double hint) {
  const auto reaches = [&](int64_t index) { return values.Magnitude(index) >= hint; };
  return std::partition_point(order.begin(), order.end(), reaches) - order.begin();
}

bool IsHint(double hint) { return hint > 0 && hint < std::numeric_limits<double>::infinity(); }

// The expected result of a call, which does not depend on the hint or on the division into ranges.
struct Case {
  const Values& values;
  const std::vector<int64_t>& order;
  int64_t k;
  uint64_t seed;
  std::vector<int64_t> indices;
  double threshold;
};

Case MakeCase(const Values& values, const std::vector<int64_t>& order, int64_t k, uint64_t seed) {
  const double last = values.Magnitude(order[static_cast<size_t>(k - 1)]);
  return {values, order, k, seed, FirstSorted(order, k), std::isnan(last) ? 0.0 : last};
}

void Check(const Case& c, double hint, const Cut& cut, Selection* selection) {
  std::ostringstream where;
  where << Name(c.values.dtype()) << ", n = " << c.values.size() << ", k = " << c.k << ", seed " << c.seed << ", hint "
        << hint << ", " << cut.name << "; threshold " << c.threshold;
  const Status status = SelectTopK(c.values.array(), {c.k, hint, c.seed}, cut.run, selection);
  EXPECT_STATUS(StatusKind::kOk, status, where.str());
  EXPECT_EQ(c.indices, selection->indices, where.str());
  EXPECT_EQ(c.threshold, selection->threshold, where.str());
  if (!IsHint(hint)) return;
  const int64_t reaching =
      CountReaching(c.values, c.order, hint);  // counted exactly up to 2k, and to 2k or more beyond
  EXPECT(selection->passed <= reaching && selection->passed >= std::min(reaching, 2 * c.k),
         selection->passed << " passed of " << reaching << "; " << where.str());
}

std::vector<double> Hints(double threshold) {
  const double infinity = std::numeric_limits<double>::infinity();
  return {
      0,     threshold / 2, threshold * 0.98, threshold, std::nextafter(threshold, infinity),     threshold * 2, 1e30,
      1e300, infinity,      5e-324,           -1.0,      std::numeric_limits<double>::quiet_NaN()};
}

std::set<int64_t> SomeCounts(int64_t n) {
  std::set<int64_t> ks{1, 2, n / 1000, n / 10, n / 2, n - 1, n};
  ks.erase(ks.begin(), ks.lower_bound(1));
  ks.erase(ks.upper_bound(n), ks.end());
  return ks;
}

TEST(SmallOnesMatchASort) {
  Selection selection;  // reused: nothing of the last call may be left
  for (const DType dtype : kDTypes) {
    for (const Pattern pattern : kPatterns) {
      for (const int64_t n : {1, 2, 3, 63, 64, 65, 1000, 4097}) {
        const uint64_t seed = static_cast<uint64_t>(n) * 31;
        const Values values = Draw(dtype, pattern, n, seed);
        const std::vector<int64_t> order = OrderOf(values, seed);
        for (const int64_t k : SomeCounts(n)) {
          if (!expect::Chosen(5)) continue;
          const Case c = MakeCase(values, order, k, seed);
          for (const double hint : Hints(c.threshold)) Check(c, hint, AllCuts()[0], &selection);
          Check(c, 0, AllCuts()[1], &selection);
          Check(c, c.threshold / 2, AllCuts()[1], &selection);
          Check(c, c.threshold, AllCuts()[2], &selection);
        }
      }
    }
  }
}

TEST(LargeOnesMatchASort) {
  Selection selection;
  size_t turn = 0;
  for (const int64_t n : {65535, 65536, 65537, 131072}) {
    for (const Pattern pattern : kPatterns) {
      const DType dtype = kDTypes[turn % 4];
      turn += 3;
      const uint64_t seed = turn;
      const Values values = Draw(dtype, pattern, n, seed);
      const std::vector<int64_t> order = OrderOf(values, seed);
      for (const int64_t k : {int64_t{1}, n / 1000, n / 3, n}) {
        const Case c = MakeCase(values, order, k, seed);
        const std::vector<double> hints = Hints(c.threshold);
        for (const Cut& cut : AllCuts()) {
          if (!expect::Chosen(5)) continue;
          Check(c, hints[turn++ % hints.size()], cut, &selection);
        }
      }
    }
  }
}

// Many more than 2k + 1024 pass in every range: candidates are cut while they gather, again and again.
TEST(CutsWhileGathering) {
  Selection selection;
  for (const Pattern pattern : {Pattern::kConstant, Pattern::kTies, Pattern::kAscending, Pattern::kSpread}) {
    const Values values = Draw(DType::kFloat32, pattern, 100000, 8);
    for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
      const std::vector<int64_t> order = OrderOf(values, seed);
      for (const int64_t k : {1, 100, 3000}) {
        const Case c = MakeCase(values, order, k, seed);
        for (const Cut& cut : AllCuts()) Check(c, 5e-324, cut, &selection);
      }
    }
  }
}

// With fewer than k nonzero elements, their number is known when all of them are candidates: no exact threshold is
// needed, whose histograms take ten times as long. Its passes would be three more.
TEST(FewerThanKNonzerosTakeTwoPasses) {
  const int64_t n = 100000, k = 1000;
  for (const int64_t nonzeros : {int64_t{0}, int64_t{1}, k - 1}) {
    std::vector<float> values(static_cast<size_t>(n));
    for (int64_t i = 0; i < nonzeros; ++i) values[static_cast<size_t>(7 * i)] = static_cast<float>(i + 1);
    for (const double hint : {0.0, 0.5}) {
      int passes = 0;
      const ParallelFor counting = [&](int64_t begin, int64_t end, int64_t, const RangeFunction& body) {
        ++passes;
        body(begin, end);
      };
      Selection selection;
      EXPECT_STATUS(StatusKind::kOk,
                    SelectTopK({values.data(), n, DType::kFloat32}, {k, hint, 3}, counting, &selection), nonzeros);
      EXPECT_EQ(k, static_cast<int64_t>(selection.indices.size()), nonzeros);
      EXPECT(passes <= 2, nonzeros << " nonzeros, hint " << hint << ": " << passes << " passes");
    }
  }
}

TEST(PositionDoesNotDecideTies) {
  constexpr int64_t kSize = 100000, kChosen = 10000;
  const Values values = Draw(DType::kFloat32, Pattern::kConstant, kSize, 1);
  Selection first, second;
  EXPECT_STATUS(StatusKind::kOk, SelectTopK(values.array(), {kChosen, 0, 1}, SerialFor, &first), "");
  EXPECT_STATUS(StatusKind::kOk, SelectTopK(values.array(), {kChosen, 0, 2}, SerialFor, &second), "");
  std::vector<int64_t> tenths(10, 0), both;
  for (const int64_t index : first.indices) ++tenths[static_cast<size_t>(index / (kSize / 10))];
  for (const int64_t count : tenths) EXPECT(count > 850 && count < 1150, count << " in a tenth");
  std::set_intersection(first.indices.begin(), first.indices.end(), second.indices.begin(), second.indices.end(),
                        std::back_inserter(both));
  EXPECT(both.size() > 850 && both.size() < 1150, both.size() << " chosen by both seeds");
}

#if defined(__SSE3__) || defined(__x86_64__)
TEST(HostThatFlushesDenormalsSelectsTheSame) {
  for (const DType dtype : kDTypes) {
    for (const Pattern pattern : {Pattern::kDenormals, Pattern::kMixed, Pattern::kAnyBits}) {
      const Values values = Draw(dtype, pattern, 5000, 2);
      const std::vector<int64_t> order = OrderOf(values, 3);
      for (const int64_t k : {1, 500, 4999}) {
        const Case c = MakeCase(values, order, k, 3);
        for (const double hint : {0.0, c.threshold / 2, c.threshold}) {
          Selection selection;
          const unsigned before = _mm_getcsr();
          _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
          _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
          const Status status = SelectTopK(values.array(), {k, hint, 3}, SerialFor, &selection);
          _mm_setcsr(before);
          EXPECT_STATUS(StatusKind::kOk, status, Name(dtype));
          EXPECT_EQ(c.indices, selection.indices, Name(dtype) << ", " << Name(pattern) << ", hint " << hint);
        }
      }
    }
  }
}
#endif

TEST(RefusesWhatCannotBe) {
  const Values values = Draw(DType::kFloat64, Pattern::kSpread, 10, 1);
  const Values none(DType::kFloat64, 0);
  Selection selection;
  for (const int64_t k : {int64_t{0}, int64_t{-1}, int64_t{11}, std::numeric_limits<int64_t>::max(),
                          std::numeric_limits<int64_t>::min()}) {
    EXPECT_STATUS(StatusKind::kInvalidArgument, SelectTopK(values.array(), {k}, SerialFor, &selection), "k = " << k);
  }
  EXPECT_STATUS(StatusKind::kInvalidArgument, SelectTopK(none.array(), {1}, SerialFor, &selection), "of none");
  std::vector<int64_t> indices;
  for (const double bad : {-1.0, -5e-324, -1e300, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_STATUS(StatusKind::kInvalidArgument, FilterThreshold(values.array(), bad, SerialFor, &indices), bad);
  }
}

TEST(FilterMatchesALoop) {
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<int64_t> indices{1, 2, 3};
  for (const DType dtype : kDTypes) {
    for (const Pattern pattern : kPatterns) {
      for (const int64_t n : {0, 1, 2, 65, 1000, 65537}) {
        const Values values = Draw(dtype, pattern, n, static_cast<uint64_t>(n) + 5);
        const double some = n > 0 && !std::isnan(values.At(n / 2)) ? values.Magnitude(n / 2) : 0.5;
        const std::vector<double> few{some, infinity};
        const std::vector<double> many{
            0.0,   -0.0,     some,  std::nextafter(some, infinity), std::nextafter(some, 0.0), 1.0, 1e30,
            1e300, infinity, 5e-324};
        for (const double threshold : n > 1000 ? few : many) {
          if (!expect::Chosen(5)) continue;
          std::vector<int64_t> expected;
          for (int64_t i = 0; i < n; ++i) {
            if (values.Magnitude(i) >= threshold) expected.push_back(i);
          }
          for (const Cut& cut : AllCuts()) {
            const Status status = FilterThreshold(values.array(), threshold, cut.run, &indices);
            EXPECT_STATUS(StatusKind::kOk, status, "");
            EXPECT_EQ(expected, indices,
                      Name(dtype) << ", " << Name(pattern) << ", n = " << n << ", " << threshold << ", " << cut.name);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace hvd_sparse
