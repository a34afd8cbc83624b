#include "run_length.h"

#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "expect.h"

namespace hvd_sparse {
namespace {

struct Encoded {
  std::vector<uint32_t> counts;
  std::vector<uint16_t> runs;
};

// The expected result: a loop over every element of every block.
Encoded EncodeByWalking(const std::vector<bool>& chosen) {
  Encoded encoded;
  for (size_t start = 0; start < chosen.size(); start += 65536) {
    uint32_t count = 0, zeros = 0;
    for (size_t i = start; i < chosen.size() && i < start + 65536; ++i) {
      if (chosen[i]) {
        encoded.runs.push_back(static_cast<uint16_t>(zeros));
        ++count;
        zeros = 0;
      } else {
        ++zeros;
      }
    }
    encoded.counts.push_back(count);
  }
  return encoded;
}

void CheckRoundTrip(const std::vector<bool>& chosen, const char* what) {
  const auto n = static_cast<int64_t>(chosen.size());
  std::vector<int64_t> indices;
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (chosen[i]) indices.push_back(static_cast<int64_t>(i));
  }
  const auto k = static_cast<int64_t>(indices.size());
  Encoded encoded{std::vector<uint32_t>(static_cast<size_t>(BlockCount(n)), 99u),
                  std::vector<uint16_t>(indices.size())};
  EXPECT_STATUS(StatusKind::kOk, EncodeRunLength(indices.data(), k, n, encoded.counts.data(), encoded.runs.data()),
                what << ", n = " << n);
  const Encoded expected = EncodeByWalking(chosen);
  EXPECT_EQ(expected.counts, encoded.counts, what << ", n = " << n << ", k = " << k);
  EXPECT_EQ(expected.runs, encoded.runs, what << ", n = " << n << ", k = " << k);
  EXPECT_STATUS(StatusKind::kOk, ValidateRunLength(expected.counts.data(), expected.runs.data(), k, n),
                what << ", n = " << n << ", k = " << k);
  std::vector<int64_t> decoded(indices.size(), -1);
  DecodeRunLength(expected.counts.data(), expected.runs.data(), n, decoded.data());
  EXPECT_EQ(indices, decoded, what << ", n = " << n << ", k = " << k);
}

TEST(RoundTripsAtEverySize) {
  std::mt19937_64 random(1);
  for (const size_t n : {1, 2, 3, 100, 65535, 65536, 65537, 131071, 131072, 131073, 200000}) {
    CheckRoundTrip(std::vector<bool>(n, false), "none");
    CheckRoundTrip(std::vector<bool>(n, true), "all");
    for (const uint64_t one_in : {2, 100, 40000}) {
      std::vector<bool> chosen(n);
      for (size_t i = 0; i < n; ++i) chosen[i] = random() % one_in == 0;
      CheckRoundTrip(chosen, "some");
    }
    for (const size_t at : {size_t{0}, n / 2, n - 1}) {
      std::vector<bool> chosen(n);
      chosen[at] = true;
      CheckRoundTrip(chosen, "one");
      chosen[0] = chosen[n - 1] = true;
      CheckRoundTrip(chosen, "one and the ends");
    }
  }
  CheckRoundTrip({}, "nothing at all");
}

TEST(LongestRunFitsIn16Bits) {
  std::vector<bool> chosen(3 * 65536);
  chosen[65535] = chosen[65536 + 65535] = chosen[2 * 65536] = true;  // 65,535 zeros, across a boundary, none
  CheckRoundTrip(chosen, "edges of blocks");
}

TEST(EncodeRefusesDisorder) {
  constexpr int64_t kSize = 70000;
  const int64_t lowest = std::numeric_limits<int64_t>::min(), highest = std::numeric_limits<int64_t>::max();
  const std::vector<std::vector<int64_t>> wrong{{-1},    {kSize},    {5, 5},   {6, 5},    {0, 1, 2, 1}, {65536, 65535},
                                                {-1, 0}, {0, kSize}, {lowest}, {highest}, {3, lowest},  {3, highest}};
  for (const std::vector<int64_t>& indices : wrong) {
    const auto k = static_cast<int64_t>(indices.size());
    std::vector<uint32_t> counts(2);
    std::vector<uint16_t> runs(indices.size());
    EXPECT_STATUS(StatusKind::kInvalidArgument, EncodeRunLength(indices.data(), k, kSize, counts.data(), runs.data()),
                  "first " << indices[0]);
  }
}

// Places every entry by hand.
bool IsValid(const std::vector<uint32_t>& counts, const std::vector<uint16_t>& runs, int64_t n) {
  size_t j = 0;
  for (size_t block = 0; block < counts.size(); ++block) {
    int64_t position = static_cast<int64_t>(block) * 65536 - 1;
    for (uint32_t i = 0; i < counts[block]; ++i) {
      if (j == runs.size()) return false;
      position += runs[j++] + 1;
      if (position >= n || position >= static_cast<int64_t>(block + 1) * 65536) return false;
    }
  }
  return j == runs.size();
}

// Validates heap copies of exact size, and decodes accepted ones to exactly k indices. Returns whether it was accepted.
bool CheckVerdict(const std::vector<uint32_t>& counts, const std::vector<uint16_t>& runs, int64_t n) {
  const std::unique_ptr<uint32_t[]> count(new uint32_t[counts.size()]);
  const std::unique_ptr<uint16_t[]> run(new uint16_t[runs.size()]);
  std::copy(counts.begin(), counts.end(), count.get());
  std::copy(runs.begin(), runs.end(), run.get());
  const bool valid = IsValid(counts, runs, n);
  const Status status = ValidateRunLength(count.get(), run.get(), static_cast<int64_t>(runs.size()), n);
  EXPECT_EQ(valid ? StatusKind::kOk : StatusKind::kCorruptPayload, status.kind,
            "n = " << n << ", first count " << counts[0] << ", " << runs.size() << " runs");
  if (!status.ok()) return false;
  const std::unique_ptr<int64_t[]> indices(new int64_t[runs.size()]);
  DecodeRunLength(count.get(), run.get(), n, indices.get());
  int64_t previous = -1;
  for (size_t j = 0; j < runs.size(); ++j) {
    EXPECT(indices[j] > previous && indices[j] < n, "index " << indices[j] << " after " << previous << ", n = " << n);
    previous = indices[j];
  }
  return true;
}

TEST(EveryTinyInputGetsTheRightVerdict) {
  int accepted = 0;
  for (int64_t n = 1; n <= 4; ++n) {
    for (uint32_t count = 0; count <= 6; ++count) {
      for (size_t k = 0; k <= 3; ++k) {
        for (int code = 0; code < (k == 0 ? 1 : k == 1 ? 6 : k == 2 ? 36 : 216); ++code) {
          std::vector<uint16_t> runs;
          for (int rest = code; runs.size() < k; rest /= 6) runs.push_back(static_cast<uint16_t>(rest % 6));
          accepted += CheckVerdict({count}, runs, n);
        }
      }
    }
  }
  EXPECT(accepted > 20, accepted << " accepted");
}

TEST(HostileCountsAndRuns) {
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  const int64_t n = 2 * 65536 + 10;
  EXPECT(CheckVerdict({1, 0, 1}, {65535, 9}, n), "the last place of its block");
  EXPECT(CheckVerdict({0, 65536, 0}, std::vector<uint16_t>(65536, 0), n), "a full block");
  EXPECT(CheckVerdict({0, 0, 10}, std::vector<uint16_t>(10, 0), n), "a full last block");
  EXPECT(!CheckVerdict({1, 0, 1}, {65535, 10}, n), "past the short last block");
  EXPECT(!CheckVerdict({2, 0, 0}, {65535, 0}, n), "past a block");
  EXPECT(!CheckVerdict({2, 0, 0}, {32768, 32767}, n), "one past a block, in two runs");
  EXPECT(CheckVerdict({2, 0, 0}, {32768, 32766}, n), "the last place, in two runs");
  EXPECT(!CheckVerdict({0, 0, 11}, std::vector<uint16_t>(11, 0), n), "more than the short last block holds");
  EXPECT(!CheckVerdict({65537, 0, 0}, std::vector<uint16_t>(65537, 0), n), "more than a block holds");
  EXPECT(!CheckVerdict({kMost, 0, 0}, {0}, n), "the largest count");
  EXPECT(!CheckVerdict({kMost, 2, 0}, {0}, n), "a sum that wraps to 1 in 32 bits");
  EXPECT(!CheckVerdict({0, 0, 0}, {0}, n), "too few");
  EXPECT(!CheckVerdict({1, 1, 0}, {0}, n), "too many");
  EXPECT(!CheckVerdict({65536, 0, 0}, std::vector<uint16_t>(65536, 65535), n), "the largest runs");
}

TEST(RandomCountsAndRunsGetTheRightVerdict) {
  std::mt19937_64 random(7);
  int accepted = 0;
  for (int i = 0; i < 10000; ++i) {
    const int64_t n = 65536 * static_cast<int64_t>(random() % 3) + 1 + static_cast<int64_t>(random() % 65536);
    std::vector<uint32_t> counts(static_cast<size_t>(BlockCount(n)));
    std::vector<uint16_t> runs;
    for (uint32_t& count : counts) {
      count = static_cast<uint32_t>(random() % 5);
      for (uint32_t j = 0; j < count; ++j) runs.push_back(static_cast<uint16_t>(random() >> (random() % 64)));
    }
    if (random() % 8 == 0) counts[random() % counts.size()] += static_cast<uint32_t>(random());
    accepted += CheckVerdict(counts, runs, n);
  }
  EXPECT(accepted > 500 && accepted < 9500, accepted << " accepted of 10000");
}

}  // namespace
}  // namespace hvd_sparse
