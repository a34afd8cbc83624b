#include "merge.h"

#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "expect.h"

namespace hvd_sparse {
namespace {

struct Drawn {
  std::vector<int64_t> indices;
  std::vector<float> values;
  std::vector<int64_t> counts;

  EntryLists lists() const {
    return {indices.data(), values.data(), counts.data(), static_cast<int64_t>(counts.size())};
  }
};

Drawn Draw(int64_t lists, int64_t spread, uint64_t seed) {
  std::mt19937_64 random(seed);
  Drawn drawn;
  for (int64_t list = 0; list < lists; ++list) {
    std::set<int64_t> own;
    const auto count = random() % 300;
    while (own.size() < std::min<uint64_t>(count, static_cast<uint64_t>(spread))) {
      own.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(spread)));
    }
    drawn.indices.insert(drawn.indices.end(), own.begin(), own.end());
    drawn.counts.push_back(static_cast<int64_t>(own.size()));
  }
  for (size_t i = 0; i < drawn.indices.size(); ++i) drawn.values.push_back(static_cast<float>(random() % 1000) / 7);
  return drawn;
}

// The expected result: a map of sums to which the lists are added in order.
void TestSums(int64_t lists, int64_t spread, uint64_t seed) {
  const Drawn drawn = Draw(lists, spread, seed);
  std::map<int64_t, float> expected;
  for (size_t i = 0; i < drawn.indices.size(); ++i) expected[drawn.indices[i]] += drawn.values[i];
  std::vector<int64_t> indices(drawn.indices.size());
  std::vector<float> sums(drawn.indices.size());
  int64_t found = -1;
  EXPECT_STATUS(StatusKind::kOk, MergeEntries(drawn.lists(), indices.data(), sums.data(), &found),
                "lists " << lists << ", spread " << spread);
  EXPECT_EQ(static_cast<int64_t>(expected.size()), found, "of " << lists << " lists");
  size_t at = 0;
  for (const auto& [index, sum] : expected) {
    EXPECT_EQ(index, indices[at], "index");
    EXPECT_EQ(sum, sums[at++], "sum");
  }
}

TEST(RefusesWhatDoesNotAscend) {
  int64_t found = 0;
  int64_t indices[3];
  float sums[3];
  const float values[] = {1, 2, 3};
  const int64_t equal[] = {4, 4, 5};
  const int64_t negative[] = {-1, 0, 1};
  const int64_t counts[] = {3};
  EXPECT_STATUS(StatusKind::kInvalidArgument, MergeEntries({equal, values, counts, 1}, indices, sums, &found), "equal");
  EXPECT_STATUS(StatusKind::kInvalidArgument, MergeEntries({negative, values, counts, 1}, indices, sums, &found), "-1");
  const int64_t apart[] = {2, 1};
  EXPECT_STATUS(StatusKind::kOk, MergeEntries({equal, values, apart, 0}, indices, sums, &found), "no lists");
  EXPECT_EQ(int64_t{0}, found, "of no lists");
}

void TestCommon(int64_t spread, uint64_t seed) {
  const Drawn drawn = Draw(2, spread, seed);
  const int64_t* others = drawn.indices.data() + drawn.counts[0];
  const std::set<int64_t> known(others, others + drawn.counts[1]);
  const auto common = std::make_unique<bool[]>(static_cast<size_t>(drawn.counts[0]));
  FindCommon(drawn.indices.data(), drawn.counts[0], others, drawn.counts[1], common.get());
  for (int64_t i = 0; i < drawn.counts[0]; ++i) {
    EXPECT_EQ(known.count(drawn.indices[static_cast<size_t>(i)]) == 1, common[static_cast<size_t>(i)], "common");
  }
}

constexpr int64_t kSpreads[] = {1, 300, int64_t{1} << 15, 100'000, int64_t{1} << 45};

TEST(SumsOfAnyNumberOfLists) {
  uint64_t seed = 0;
  for (const int64_t spread : kSpreads) {
    for (const int64_t lists : {0, 1, 2, 3, 64}) TestSums(lists, spread, ++seed);
  }
}

TEST(CommonIndices) {
  for (const int64_t spread : kSpreads) {
    for (uint64_t seed = 0; seed < 10; ++seed) TestCommon(spread, seed);
  }
}

}  // namespace
}  // namespace hvd_sparse
