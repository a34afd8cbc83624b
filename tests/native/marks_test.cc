#include "marks.h"

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "checksum.h"
#include "expect.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kBlock = 65'536;
constexpr int64_t kSizes[] = {1, 63, 64, 65, 1000, kBlock - 1, kBlock, kBlock + 1, 3 * kBlock + 17};

using Indices = std::set<int64_t>;

Indices Draw(int64_t n, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Indices drawn;
  for (int64_t i = 0; i < count; ++i) drawn.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(n)));
  return drawn;
}

std::vector<uint64_t> MarksOf(const Indices& indices, int64_t n) {
  std::vector<uint64_t> marks(static_cast<size_t>(MarkWords(n)));
  for (const int64_t i : indices) marks[static_cast<size_t>(i / 64)] |= uint64_t{1} << (i % 64);
  return marks;
}

std::vector<float> DrawValues(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = static_cast<float>(static_cast<int64_t>(random() % 2001) - 1000) / 8;
  return values;
}

// What an update changed, in memory of exactly its size.
struct Update {
  std::vector<uint32_t> counts;
  std::vector<uint16_t> places;

  Update(const Indices& indices, int64_t n) : counts(static_cast<size_t>((n + kBlock - 1) / kBlock)) {
    for (const int64_t i : indices) {
      ++counts[static_cast<size_t>(i / kBlock)];
      places.push_back(static_cast<uint16_t>(i % kBlock));
    }
  }
  Changed changed() const { return {counts.data(), places.data()}; }
};

TEST(UpdatesAreMarkedBesideWhatIs) {
  for (const int64_t n : kSizes) {
    Indices expected = Draw(n, 20, 1);
    std::vector<uint64_t> marks = MarksOf(expected, n);
    std::vector<Update> updates;
    std::vector<Changed> changed;
    for (uint64_t seed = 2; seed < 5; ++seed) {
      const Indices own = Draw(n, 100, seed);
      updates.emplace_back(own, n);
      expected.insert(own.begin(), own.end());
    }
    for (const Update& update : updates) changed.push_back(update.changed());
    int64_t marked = -1;
    EXPECT_STATUS(StatusKind::kOk, MarkUpdates(changed, n, marks.data(), &marked), "n " << n);
    EXPECT_EQ(static_cast<int64_t>(expected.size()), marked, "marks, n " << n);
    EXPECT_EQ(MarksOf(expected, n), marks, "words, n " << n);
    EXPECT_EQ(marked, CountMarks(marks.data(), MarkWords(n)), "count, n " << n);
  }
}

TEST(ClocksOfAnUpdateAreSet) {
  for (const int64_t n : kSizes) {
    const Indices own = Draw(n, 100, 2);
    const Update update(own, n);
    std::vector<uint32_t> expected(static_cast<size_t>(n), 3);
    std::vector<uint32_t> clocks = expected;
    for (const int64_t i : own) expected[static_cast<size_t>(i)] = 7;
    EXPECT_STATUS(StatusKind::kOk, SetClocks(update.changed(), n, 7, clocks.data()), "n " << n);
    EXPECT_EQ(expected, clocks, "clocks, n " << n);
  }
}

TEST(PlacesFromNOnAreRefused) {
  const int64_t n = kBlock + 10;
  const Update beyond(Indices{3, kBlock + 10}, kBlock + 64);
  std::vector<uint64_t> marks = MarksOf({5}, n);
  int64_t marked = -1;
  EXPECT_STATUS(StatusKind::kInvalidArgument, MarkUpdates({beyond.changed()}, n, marks.data(), &marked), "beyond");
  EXPECT_EQ(MarksOf({5}, n), marks, "unchanged");
  std::vector<uint32_t> clocks(static_cast<size_t>(n), 3);
  EXPECT_STATUS(StatusKind::kInvalidArgument, SetClocks(beyond.changed(), n, 7, clocks.data()), "beyond");
  EXPECT_EQ(std::vector<uint32_t>(static_cast<size_t>(n), 3), clocks, "clocks, unchanged");
}

TEST(ClocksAboveAreMarked) {
  for (const int64_t n : kSizes) {
    std::mt19937_64 random(static_cast<uint64_t>(n));
    std::vector<uint32_t> clocks(static_cast<size_t>(n));
    Indices expected;
    for (int64_t i = 0; i < n; ++i) {
      const auto clock = static_cast<uint32_t>(random() % 5 == 0 ? ~uint32_t{0} : random() % 4);
      clocks[static_cast<size_t>(i)] = clock;
      if (clock > 2) expected.insert(i);
    }
    std::vector<uint64_t> marks = MarksOf(Draw(n, 9, 1), n);
    EXPECT_EQ(static_cast<int64_t>(expected.size()), MarkChangedAfter(clocks.data(), n, 2, marks.data()), "n " << n);
    EXPECT_EQ(MarksOf(expected, n), marks, "words, n " << n);
  }
}

TEST(MarkedElementsAreVisitedInAnyRange) {
  const int64_t n = 300;
  const Indices all = Draw(n, 150, 3);
  const std::vector<uint64_t> marks = MarksOf(all, n);
  for (int64_t begin = 0; begin <= n; begin += 7) {
    for (int64_t end = begin; end <= n; end += 11) {
      const std::vector<int64_t> expected(all.lower_bound(begin), all.lower_bound(end));
      std::vector<int64_t> found, ahead;
      ForEachMarked(marks.data(), begin, end, [&](int64_t i) { found.push_back(i); });
      ForEachMarkedAhead(marks.data(), begin, end, [](int64_t) {}, [&](int64_t i) { ahead.push_back(i); });
      EXPECT_EQ(expected, found, "from " << begin << " to " << end);
      EXPECT_EQ(expected, ahead, "ahead, from " << begin << " to " << end);
    }
  }
}

void CheckPackedMarks(Coding coding, int64_t drawn) {
  for (const int64_t n : kSizes) {
    const Indices chosen = Draw(n, drawn, 4);
    const std::vector<int64_t> indices(chosen.begin(), chosen.end());
    const std::vector<float> values = DrawValues(n, 5);
    std::vector<float> own;
    for (const int64_t i : indices) own.push_back(values[static_cast<size_t>(i)]);
    PayloadFormat format;
    format.n = n;
    format.k = static_cast<int64_t>(indices.size());
    format.coding = coding;
    int64_t size = 0;
    EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "n " << n);
    std::vector<uint8_t> expected(static_cast<size_t>(size)), found(static_cast<size_t>(size));
    EXPECT_STATUS(StatusKind::kOk, Pack(format, indices.data(), own.data(), format.k, expected.data()), "n " << n);
    const std::vector<uint64_t> marks = MarksOf(chosen, n);
    EXPECT_STATUS(StatusKind::kOk, PackMarked(format, values.data(), marks.data(), found.data()), "n " << n);
    EXPECT_EQ(expected, found, "bytes, n " << n);
    EXPECT_EQ(Crc32(found.data(), found.size()), SealedCrc(found.data(), size), "checksum, n " << n);
    if (format.k < n) {
      ++format.k;
      std::vector<uint8_t> larger(static_cast<size_t>(size) + 1024);
      EXPECT_STATUS(StatusKind::kInvalidArgument, PackMarked(format, values.data(), marks.data(), larger.data()),
                    "a mark is missing, n " << n);
    }
  }
}

TEST(PackedMarksAreAPackedSelection) {
  for (const Coding coding : {Coding::kRunLength, Coding::kEliasFano, Coding::kBitmap}) {
    for (const int64_t drawn : {1, 500, 30'000, 400'000}) CheckPackedMarks(coding, drawn);  // rare, frequent, most
  }
}

TEST(MarksFromNOnAreRefused) {
  constexpr int64_t kN = 70, kCount = 10;
  const std::vector<float> values = DrawValues(kN, 1);
  Indices indices;
  for (int64_t i = 0; i < kCount; ++i) indices.insert(7 * i);
  std::vector<uint64_t> marks = MarksOf(indices, kN);
  for (int64_t i = kN; i < kN + 6; ++i) marks[1] |= uint64_t{1} << (i % 64);
  for (const Coding coding : {Coding::kRunLength, Coding::kEliasFano, Coding::kBitmap}) {
    for (const int64_t k : {kCount, kCount + 6}) {
      std::vector<uint8_t> payload(1000, 7);
      EXPECT_STATUS(StatusKind::kInvalidArgument,
                    PackMarked({kN, k, coding}, values.data(), marks.data(), payload.data()), k);
      EXPECT(payload == std::vector<uint8_t>(1000, 7), "nothing is written");
    }
  }
}

TEST(WhatReachesTheFloorIsSelectedAndTheRestForgotten) {
  for (const int64_t n : kSizes) {
    const std::vector<float> minuend = DrawValues(n, 6), subtrahend = DrawValues(n, 7);
    const Indices marked = Draw(n, n, 8);
    const double floor = 100;
    const int64_t begin = n / 3, end = n;
    std::vector<int64_t> expected;
    Indices left = marked;
    for (const int64_t i : marked) {
      if (i < begin) continue;
      const float difference = minuend[static_cast<size_t>(i)] - subtrahend[static_cast<size_t>(i)];
      if (std::fabs(difference) >= floor) {
        expected.push_back(i - begin);
      } else {
        left.erase(i);
      }
    }
    std::vector<uint64_t> marks = MarksOf(marked, n);
    MarkedSelection selected;
    const Difference difference{minuend.data(), subtrahend.data(), begin, end};
    EXPECT_STATUS(StatusKind::kOk, SelectMarked(difference, end - begin, 1, floor, marks.data(), &selected), "n " << n);
    EXPECT_EQ(expected, selected.indices, "indices, n " << n);
    EXPECT_EQ(static_cast<int64_t>(expected.size()), selected.reaching, "reaching, n " << n);
    EXPECT_EQ(MarksOf(left, n), marks, "marks, n " << n);
    EXPECT_EQ(false, selected.has_nan, "NaN, n " << n);
    for (size_t j = 0; j < expected.size() && j < selected.values.size(); ++j) {
      const auto i = static_cast<size_t>(expected[j] + begin);
      EXPECT_EQ(minuend[i] - subtrahend[i], selected.values[j], "value, n " << n);
    }
  }
}

TEST(AddedValuesTakeTheirMarksAway) {
  for (const int64_t n : kSizes) {
    const Indices marked = Draw(n, 200, 9);
    const std::vector<int64_t> indices(marked.begin(), marked.end());
    const std::vector<float> minuend = DrawValues(n, 10);
    std::vector<float> subtrahend(static_cast<size_t>(n)), values;
    std::vector<uint64_t> marks = MarksOf(marked, n);
    for (const int64_t i : indices) values.push_back(minuend[static_cast<size_t>(i)] - (i % 2 == 0 ? 0.0f : 8.0f));
    const auto count = static_cast<int64_t>(indices.size());
    EXPECT_STATUS(
        StatusKind::kOk,
        AddMarked(indices.data(), values.data(), count, minuend.data(), 1, n, subtrahend.data(), marks.data()),
        "n " << n);
    Indices left;
    for (const int64_t i : indices) {
      if (i % 2 != 0) left.insert(i);
    }
    EXPECT_EQ(MarksOf(left, n), marks, "marks, n " << n);
    const int64_t beyond[] = {n};
    const float one[] = {1};
    const std::vector<float> before = subtrahend;
    EXPECT_STATUS(StatusKind::kInvalidArgument,
                  AddMarked(beyond, one, 1, minuend.data(), 1, n, subtrahend.data(), marks.data()), "n " << n);
    EXPECT_EQ(before, subtrahend, "unchanged, n " << n);
  }
}

}  // namespace
}  // namespace hvd_sparse
