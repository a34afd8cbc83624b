// The counter-based generator: its numbers equal the published ones of splitmix64, and differ for all indices.
#include "random.h"

#include <algorithm>
#include <vector>

#include "expect.h"

namespace hvd_sparse {
namespace {

// Steele, Lea, Flood (2014): the first outputs of splitmix64 from state 0, whose state grows by the constant that the
// seed is multiplied by here.
TEST(IsTheFinaliserOfSplitmix64) {
  EXPECT_EQ(uint64_t{0}, Hash(0, 0), "the only fixed point");
  EXPECT_EQ(uint64_t{0xE220A8397B1DCDAF}, Hash(1, 0), "the first");
  EXPECT_EQ(uint64_t{0x6E789E6AA1B965F4}, Hash(2, 0), "the second");
  EXPECT_EQ(uint64_t{0x06C45D188009454F}, Hash(3, 0), "the third");
  EXPECT_EQ(Hash(1, 0), Hash(0, 0x9E3779B97F4A7C15ull), "the index is added to the state");
  EXPECT_EQ(Hash(~uint64_t{0}, 0x9E3779B97F4A7C15ull), Hash(0, 0), "modulo 2^64");
}

TEST(NoTwoIndicesShareANumber) {
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
    std::vector<uint64_t> numbers;
    for (uint64_t index = 0; index < 200000; ++index) numbers.push_back(Hash(seed, index));
    std::sort(numbers.begin(), numbers.end());
    EXPECT(std::adjacent_find(numbers.begin(), numbers.end()) == numbers.end(), "seed " << seed);
  }
}

// 200,000 draws: of half of them the deviation is 224.
TEST(EveryBitIsSetHalfOfTheTime) {
  for (int bit = 0; bit < 64; ++bit) {
    int64_t set = 0;
    for (uint64_t index = 0; index < 200000; ++index) set += static_cast<int64_t>(Hash(7, index) >> bit & 1);
    EXPECT(set > 98800 && set < 101200, set << " times bit " << bit);
  }
}

}  // namespace
}  // namespace hvd_sparse
