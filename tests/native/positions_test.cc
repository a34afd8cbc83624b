#include "positions.h"

#include <random>
#include <string>

#include "expect.h"
#include "payloads.h"
#include "run_length.h"

namespace hvd_sparse {
namespace {

constexpr Coding kAll[] = {Coding::kRunLength, Coding::kDense, Coding::kEliasFano, Coding::kBitmap, Coding::kAuto};

std::string Describe(Coding coding, int64_t n, int64_t k) {
  return std::string(Name(coding)) + ", n = " + std::to_string(n) + ", k = " + std::to_string(k);
}

Coding ByHand(Coding coding, int64_t n, int64_t k) { return CodingOf({n, k, coding}); }

size_t SizeByHand(Coding coding, int64_t n, int64_t k) {
  return PlacesSize(ByHand(coding, n, k), static_cast<size_t>(n), static_cast<size_t>(k));
}

void CheckAuto(int64_t n, int64_t k) {
  EXPECT_EQ(ByHand(Coding::kAuto, n, k), ResolveCoding(Coding::kAuto, n, k), Describe(Coding::kAuto, n, k));
  const int64_t size = PositionsSize(Coding::kAuto, n, k);
  EXPECT_EQ(PositionsSize(ResolveCoding(Coding::kAuto, n, k), n, k), size, Describe(Coding::kAuto, n, k));
  for (const Coding coding : kAll) {
    if (coding == Coding::kDense && k != n) continue;
    EXPECT_EQ(static_cast<int64_t>(SizeByHand(coding, n, k)), PositionsSize(coding, n, k), Describe(coding, n, k));
    EXPECT(size <= PositionsSize(coding, n, k), size << " bytes; " << Describe(coding, n, k));
    if (coding != Coding::kAuto) EXPECT_EQ(coding, ResolveCoding(coding, n, k), Describe(coding, n, k));
  }
}

TEST(AutoIsTheSmallestOfAll) {
  for (int64_t n = 1; n <= 200; ++n) {
    for (int64_t k = 1; k <= n; ++k) CheckAuto(n, k);
  }
  for (const int64_t n : {int64_t{65535}, int64_t{65536}, int64_t{65537}, int64_t{25600000}, int64_t{1} << 48}) {
    for (int64_t k = 1; k < n; k += k / 5 + 1) CheckAuto(n, k);
    for (const int64_t k : {n - 1, n}) CheckAuto(n, k);
  }
}

TEST(AutoWorkedOutByHand) {
  const auto check = [](int64_t n, int64_t k, Coding coding, int64_t size) {
    EXPECT_EQ(coding, ResolveCoding(Coding::kAuto, n, k), "n = " << n << ", k = " << k);
    EXPECT_EQ(size, PositionsSize(Coding::kAuto, n, k), "n = " << n << ", k = " << k);
  };
  check(1, 1, Coding::kDense, 0);
  check(2, 1, Coding::kBitmap, 1);      // a byte either way
  check(10, 3, Coding::kBitmap, 2);     // two bytes either way
  check(17, 1, Coding::kEliasFano, 2);  // 3 low bits, then 2 + 1 bits; 3 bytes of bitmap
  check(25600000, 25600, Coding::kEliasFano, 38250);
  check(25600000, 2560000, Coding::kEliasFano, 1680000);  // 3 low bits, then 3,199,999 + 2,560,000 bits
  check(25600000, 7680000, Coding::kBitmap, 3200000);
  check(25600000, 25599999, Coding::kBitmap, 3200000);
  check(25600000, 25600000, Coding::kDense, 0);
}

// Counts and runs of these indices, as in Pack.
Positions PositionsOf(int64_t n, const std::vector<int64_t>& indices) {
  const Content content = MakeContent({n, static_cast<int64_t>(indices.size())}, indices, 1);
  return {content.counts, content.runs};
}

// The section of a payload without values, cut out.
Bytes SectionOf(Coding coding, int64_t n, int64_t k, const std::vector<int64_t>& indices) {
  const PayloadFormat format{n, k, coding, DType::kNone};
  const Bytes payload = BuildPayload(format, MakeContent(format, indices, 1));
  return Bytes(payload.begin() + kCountsAt, payload.begin() + static_cast<long>(kCountsAt + SizeByHand(coding, n, k)));
}

// The runs that were read, wherever they are.
std::vector<uint16_t> RunsOf(const Positions& read, int64_t entries) {
  std::vector<uint16_t> runs;
  for (int64_t j = 0; j < entries; ++j) runs.push_back(RunAt(read.Runs(), j));
  return runs;
}

void CheckRoundTrip(Coding coding, int64_t n, int64_t k, const std::vector<int64_t>& indices) {
  const std::string where = Describe(coding, n, k) + ", " + std::to_string(indices.size()) + " entries";
  const Bytes expected = SectionOf(coding, n, k, indices);
  EXPECT_EQ(static_cast<int64_t>(expected.size()), PositionsSize(coding, n, k), where);
  const std::unique_ptr<uint8_t[]> section(new uint8_t[expected.size()]());
  const Positions positions = PositionsOf(n, indices);
  const auto entries = static_cast<int64_t>(indices.size());
  WritePositions(coding, indices.data(), entries, n, k, positions, section.get());
  EXPECT(std::equal(expected.begin(), expected.end(), section.get()), where);
  const Exact copy(expected);
  Positions read{std::vector<uint32_t>(3, 7u), std::vector<uint16_t>(3, uint16_t{7}),
                 expected.data()};  // of another payload
  EXPECT_STATUS(StatusKind::kOk, ReadPositions(coding, copy.get(), n, k, entries, &read), where);
  EXPECT_EQ(positions.counts, read.counts, where);
  EXPECT_EQ(positions.runs, RunsOf(read, entries), where);
}

TEST(WritesTheDocumentedBytesAndReadsThem) {
  for (const Coding coding : kAll) {
    for (const int64_t n : {1, 2, 7, 63, 64, 65, 65535, 65536, 65537, 3 * 65536}) {
      for (const int64_t k : {int64_t{1}, n / 1000, n / 2, n - 1, n}) {
        if (k < 1 || (coding == Coding::kDense && k != n) || !expect::Chosen(2)) continue;
        CheckRoundTrip(coding, n, k, Consecutive(0, k));
        CheckRoundTrip(coding, n, k, Consecutive(n - k, k));
        CheckRoundTrip(coding, n, k, ChooseIndices(n, k, static_cast<uint64_t>(n + k)));
        CheckRoundTrip(coding, n, k, {});
      }
    }
  }
}

// Reads a heap copy of exact size. The result must be an error, or the counts and runs of the ascending indices that
// decoding by hand gives. Returns whether the bytes were accepted.
bool CheckVerdict(Coding coding, int64_t n, int64_t k, int64_t entries, const Bytes& section, const std::string& what) {
  const PayloadFormat format{n, k, coding, DType::kNone};
  Bytes payload(kCountsAt + section.size());
  std::copy(section.begin(), section.end(), payload.begin() + kCountsAt);
  std::vector<int64_t> indices;
  const bool good = ParsePlaces(format, payload, static_cast<uint64_t>(entries), &indices);
  const Exact copy(section);
  Positions read;
  const Status status = ReadPositions(coding, copy.get(), n, k, entries, &read);
  const std::string where = what + "; " + Describe(coding, n, k) + ", " + std::to_string(entries) + " entries";
  EXPECT_STATUS(good ? StatusKind::kOk : StatusKind::kCorruptPayload, status, where);
  if (!good || !status.ok()) return status.ok();
  const std::vector<int64_t> places = PlacesOf({read.counts, RunsOf(read, entries), {}});
  EXPECT_EQ(indices, places, where);
  EXPECT(places.empty() || (places.front() >= 0 && places.back() < n), where);
  EXPECT(std::adjacent_find(places.begin(), places.end(), std::greater_equal<>()) == places.end(), where);
  EXPECT_EQ(static_cast<size_t>((n + 65535) / 65536), read.counts.size(), where);
  return true;
}

TEST(AnyBytesAreRefusedOrAscendInRange) {
  std::mt19937_64 random(9);
  for (const Coding coding : kCodings) {
    int accepted = 0, refused = 0;
    for (int i = 0; i < 8000; ++i) {
      const int64_t n = 1 + static_cast<int64_t>(random() % (i % 8 == 0 ? 200000 : i % 2 == 0 ? 1000 : 12));
      const int64_t k = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(std::min<int64_t>(n, 40)));
      Bytes section = SectionOf(coding, n, k, ChooseIndices(n, k, random()));
      std::string what = "a bit flipped";
      if (i % 4 == 0) {
        what = "noise";
        const uint8_t byte = i % 16 == 0 ? 0 : 0xff;
        for (uint8_t& each : section) each = i % 16 < 8 ? byte : static_cast<uint8_t>(random() & random());
      } else {
        for (uint64_t flips = random() % 3 + 1; flips > 0 && !section.empty(); --flips) {
          section[random() % section.size()] ^= static_cast<uint8_t>(1u << random() % 8);
        }
      }
      if (!expect::Chosen(4)) continue;
      ++(CheckVerdict(coding, n, k, k, section, what) ? accepted : refused);
    }
    EXPECT(accepted > 25 && refused > 250, Name(coding) << ": " << accepted << " accepted, " << refused << " refused");
  }
}

TEST(NoEntriesHaveNoBits) {
  for (const Coding coding : kCodings) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {10, 3}, {65, 2}, {1000, 5}, {70000, 9}}) {
      const Bytes none(SizeByHand(coding, n, k));
      EXPECT(CheckVerdict(coding, n, k, 0, none, "zeros"), Describe(coding, n, k));
      EXPECT_EQ(none, SectionOf(coding, n, k, {}), Describe(coding, n, k));
      const size_t counts = coding == Coding::kRunLength ? 2 * (static_cast<size_t>(n) / 65536 + 1) : none.size();
      for (size_t bit = 0; bit < 8 * counts; bit += counts < 300 ? 1 : 997) {  // runs that no count has are padding
        Bytes some = none;
        some[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
        EXPECT(!CheckVerdict(coding, n, k, 0, some, "a bit"), "bit " << bit << "; " << Describe(coding, n, k));
      }
    }
  }
}

TEST(RefusesIndicesThatDoNotAscendOrReachN) {
  size_t seen = 0;
  for (const Lie& lie : AllLies()) {
    const PayloadFormat& format = lie.format;
    if (format.coding == Coding::kRunLength) continue;
    ++seen;
    const auto entries = static_cast<int64_t>(ReadNumber(lie.bytes, kEntriesAt, 8));
    const Bytes section(
        lie.bytes.begin() + kCountsAt,
        lie.bytes.begin() + static_cast<long>(kCountsAt + SizeByHand(format.coding, format.n, format.k)));
    EXPECT(!CheckVerdict(format.coding, format.n, format.k, entries, section, lie.name), lie.name);
  }
  EXPECT(seen > 15, seen);
}

}  // namespace
}  // namespace hvd_sparse
