#include "elias_fano.h"

#include <random>
#include <string>

#include "expect.h"
#include "payloads.h"

namespace hvd_sparse {
namespace {

std::string Sizes(int64_t n, int64_t k) { return "n = " + std::to_string(n) + ", k = " + std::to_string(k); }

// All at the front, at the back, spread evenly, anywhere.
std::vector<std::vector<int64_t>> Arrangements(int64_t n, int64_t k) {
  std::vector<int64_t> spread;
  for (int64_t j = 0; j < k; ++j) spread.push_back(j * n / k);
  return {Consecutive(0, k), Consecutive(n - k, k), spread, ChooseIndices(n, k, static_cast<uint64_t>(n + k))};
}

const int64_t kNs[] = {1, 2, 7, 63, 64, 65, 1000, 65535, 65536, 65537, int64_t{1} << 20};

std::vector<int64_t> CountsOf(int64_t n) {
  std::vector<int64_t> counts;
  for (const int64_t k : {int64_t{1}, int64_t{2}, n / 1000, n / 10, n / 2 - 1, n / 2, n / 2 + 1, n - 1, n}) {
    if (k >= 1 && k <= n) counts.push_back(k);
  }
  return counts;
}

TEST(LowBitsAreTheFewestThatMakeItShortest) {
  const auto check = [](int64_t n, int64_t k) {
    EXPECT_EQ(static_cast<int>(LowBitsOf(static_cast<uint64_t>(n), static_cast<uint64_t>(k))), EliasFanoLowBits(n, k),
              Sizes(n, k));
  };
  for (int64_t n = 1; n <= 300; ++n) {
    for (int64_t k = 1; k <= n; ++k) check(n, k);
  }
  for (int shift = 8; shift <= 48; ++shift) {
    for (const int64_t n : {(int64_t{1} << shift) - 1, int64_t{1} << shift, (int64_t{1} << shift) * 5 / 8 + 1}) {
      for (int64_t k = 1; k > 0 && k < n; k = k * 3 + 1) check(n, k);
      for (const int64_t k : {n - 1, n, n / 2, n / 3, n / 1000 + 1}) check(n, k);
    }
  }
}

TEST(LowBitsAndSizesWorkedOutByHand) {
  const auto check = [](int64_t n, int64_t k, int low, int64_t lower, int64_t size) {
    EXPECT_EQ(low, EliasFanoLowBits(n, k), Sizes(n, k));
    EXPECT_EQ(lower, EliasFanoLowerSize(n, k), Sizes(n, k));
    EXPECT_EQ(size, EliasFanoSize(n, k), Sizes(n, k));
  };
  const int64_t most = int64_t{1} << 48;
  check(1, 1, 0, 0, 1);                     // 1 bit
  check(2, 1, 0, 0, 1);                     // 2 bits with no low bit or one: none
  check(3, 1, 0, 0, 1);                     // 3 bits with no low bit or one: none
  check(9, 1, 2, 1, 2);                     // 2 + 3; with one low bit 1 + 5, with three 3 + 2 as many
  check(10, 3, 1, 1, 2);                    // 3 + 7; with none 12, with two 6 + 5
  check(1000, 2, 8, 2, 3);                  // 16 + 5; with nine low bits as many, 18 + 3
  check(65, 65, 0, 0, 17);                  // 129 bits
  check(65536, 32768, 0, 0, 12288);         // 98,303 bits; with one low bit 32,768 + 65,535 = as many
  check(25600000, 25600, 9, 28800, 38250);  // 230,400 bits, then 49,999 + 25,600
  check(25600000, 1, 24, 3, 4);             // 24 + 2; 23 + 4 with one low bit less
  check(most, 1, 47, 6, 7);                 // 47 + 2
  check(most, most, 0, 0, most / 4);        // 2^49 - 1
  check(most, most - 1, 0, 0, most / 4);    // a bit less
}

TEST(EncodesAnExampleWorkedOutByHand) {
  // 300 = 1 * 256 + 0x2c, 999 = 3 * 256 + 0xe7: bits 1 + 0 and 3 + 1.
  const int64_t two[] = {300, 999};
  Bytes code(3);
  EncodeEliasFano(two, 2, 1000, code.data());
  EXPECT_EQ((Bytes{0x2c, 0xe7, 0x12}), code, "8 low bits");
  // 1 = 0 * 2 + 1, 4 = 2 * 2, 9 = 4 * 2 + 1: low bits 1, 0, 1; bits 0 + 0, 2 + 1 and 4 + 2.
  const int64_t three[] = {1, 4, 9};
  code.assign(2, 0);
  EncodeEliasFano(three, 3, 10, code.data());
  EXPECT_EQ((Bytes{0x05, 0x49}), code, "a low bit");
  code.assign(2, 0);
  EncodeBitmap(three, 3, code.data());
  EXPECT_EQ((Bytes{0x12, 0x02}), code, "a bitmap");
}

void CheckRoundTrip(int64_t n, const std::vector<int64_t>& indices) {
  const auto k = static_cast<int64_t>(indices.size());
  const std::string where = Sizes(n, k) + ", first " + std::to_string(indices[0]);
  for (const bool bitmap : {false, true}) {
    const Bytes expected = (bitmap ? BuildBitmap : BuildEliasFano)(n, indices);
    EXPECT_EQ(static_cast<int64_t>(expected.size()), bitmap ? BitmapSize(n) : EliasFanoSize(n, k), where);
    const std::unique_ptr<uint8_t[]> code(new uint8_t[expected.size()]());
    if (bitmap) {
      EncodeBitmap(indices.data(), k, code.get());
    } else {
      EncodeEliasFano(indices.data(), k, n, code.get());
    }
    EXPECT(std::equal(expected.begin(), expected.end(), code.get()), (bitmap ? "a bitmap; " : "a code; ") << where);
    const std::unique_ptr<int64_t[]> decoded(new int64_t[indices.size()]);
    const Exact copy(expected);
    EXPECT_STATUS(StatusKind::kOk, (bitmap ? DecodeBitmap : DecodeEliasFano)(copy.get(), k, n, decoded.get()), where);
    EXPECT(std::equal(indices.begin(), indices.end(), decoded.get()), (bitmap ? "a bitmap; " : "a code; ") << where);
  }
}

TEST(RoundTripsBitForBitAtEverySize) {
  for (const int64_t n : kNs) {
    for (const int64_t k : CountsOf(n)) {
      for (const std::vector<int64_t>& indices : Arrangements(n, k)) {
        if (expect::Chosen(3)) CheckRoundTrip(n, indices);
      }
    }
  }
}

TEST(RoundTripsEverySubsetOfAFewElements) {
  for (int64_t n = 1; n <= 9; ++n) {
    for (uint64_t subset = 1; subset < uint64_t{1} << n; ++subset) {
      std::vector<int64_t> indices;
      for (int64_t i = 0; i < n; ++i) {
        if ((subset >> i & 1) != 0) indices.push_back(i);
      }
      CheckRoundTrip(n, indices);
    }
  }
}

// Of n so large that no bitmap would fit: 40 low bits and more, of which each ends anywhere in a byte.
TEST(RoundTripsTheLongestLowBits) {
  std::mt19937_64 random(3);
  for (int shift = 33; shift <= 48; ++shift) {
    const int64_t n = (int64_t{1} << shift) - 7;
    for (const size_t k : {1, 2, 3, 7, 8, 9, 40}) {
      std::set<int64_t> chosen{n - 1};
      while (chosen.size() < k) chosen.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(n)));
      const std::vector<int64_t> indices(chosen.begin(), chosen.end());
      const Bytes expected = BuildEliasFano(n, indices);
      Bytes code(static_cast<size_t>(EliasFanoSize(n, static_cast<int64_t>(k))));
      EncodeEliasFano(indices.data(), static_cast<int64_t>(k), n, code.data());
      EXPECT_EQ(expected, code, Sizes(n, static_cast<int64_t>(k)));
      std::vector<int64_t> decoded(k, -1);
      const Exact copy(code);
      EXPECT_STATUS(StatusKind::kOk, DecodeEliasFano(copy.get(), static_cast<int64_t>(k), n, decoded.data()), "");
      EXPECT_EQ(indices, decoded, Sizes(n, static_cast<int64_t>(k)));
    }
  }
}

// Decodes an exact heap copy of as many of the bytes as k of n take, zeros behind them if there are fewer, and compares
// with what they spell by hand. Returns whether they spell k.
bool CheckVerdict(int64_t n, int64_t k, bool bitmap, const Bytes& bytes, const std::string& what) {
  Bytes section = bytes;
  section.resize(static_cast<size_t>(bitmap ? BitmapSize(n) : EliasFanoSize(n, k)));
  std::vector<int64_t> expected;
  const bool good = (bitmap ? ParseBitmap : ParseEliasFano)(n, k, section, 0, &expected);
  const Exact copy(section);
  const std::unique_ptr<int64_t[]> decoded(new int64_t[static_cast<size_t>(k)]);
  const Status status = (bitmap ? DecodeBitmap : DecodeEliasFano)(copy.get(), k, n, decoded.get());
  const std::string where = what + (bitmap ? ", a bitmap; " : ", Elias-Fano; ") + Sizes(n, k);
  EXPECT_STATUS(good ? StatusKind::kOk : StatusKind::kCorruptPayload, status, where);
  if (good && status.ok()) EXPECT(std::equal(expected.begin(), expected.end(), decoded.get()), where);
  return status.ok();
}

TEST(EveryShortSectionGetsTheRightVerdict) {
  int accepted = 0, refused = 0;
  for (int64_t n = 1; n <= 16; ++n) {
    for (int64_t k = 1; k <= n; ++k) {
      for (uint32_t word = 0; word < 65536; word += n == 12 ? 1 : 37) {
        if (!expect::Chosen(4)) continue;
        const Bytes bytes{static_cast<uint8_t>(word), static_cast<uint8_t>(word >> 8)};
        for (const bool bitmap : {false, true}) ++(CheckVerdict(n, k, bitmap, bytes, "any") ? accepted : refused);
      }
    }
  }
  EXPECT(accepted > 25000 && refused > 25000, accepted << " accepted, " << refused << " refused");
}

TEST(AnyBytesAreRefusedOrDecodedAsTheySpell) {
  std::mt19937_64 random(5);
  int accepted = 0, refused = 0;
  for (const int64_t n : {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{63}, int64_t{64}, int64_t{65}, int64_t{1000},
                          int64_t{65537}, (int64_t{1} << 48) - 1}) {
    for (const int64_t k : {int64_t{1}, int64_t{2}, std::min(n, int64_t{90}) / 2, std::min(n, int64_t{90})}) {
      for (const bool bitmap : {false, true}) {
        if (k < 1 || k > n || (bitmap && n > 65537)) continue;
        const auto size = static_cast<size_t>(bitmap ? BitmapSize(n) : EliasFanoSize(n, k));
        for (int i = 0; i < 50; ++i) {
          Bytes noise(size);
          for (uint8_t& byte : noise) {
            byte = static_cast<uint8_t>(i == 0 ? 0 : i == 1 ? 0xff : i % 2 == 0 ? random() : random() & random());
          }
          ++(CheckVerdict(n, k, bitmap, noise, "noise " + std::to_string(i)) ? accepted : refused);
        }
      }
    }
  }
  EXPECT(accepted > 50 && refused > 500, accepted << " accepted, " << refused << " refused");
}

TEST(FlippedBitsAndOtherCountsGetTheRightVerdict) {
  for (const int64_t n : {1, 2, 7, 63, 64, 65, 1000, 65537}) {
    for (const int64_t k : {int64_t{1}, n / 1000, n / 2, n - 1, n}) {
      if (k < 1 || k > n) continue;
      const std::vector<int64_t> indices = ChooseIndices(n, k, 3);
      for (const bool bitmap : {false, true}) {
        const Bytes good = (bitmap ? BuildBitmap : BuildEliasFano)(n, indices);
        EXPECT(CheckVerdict(n, k, bitmap, good, "good"), Sizes(n, k));
        const size_t upper = bitmap ? 0 : 8 * static_cast<size_t>(EliasFanoLowerSize(n, k));
        for (size_t bit = 0; bit < 8 * good.size(); bit += good.size() < 300 ? 1 : 4999) {
          Bytes flipped = good;
          flipped[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
          const bool accepted = CheckVerdict(n, k, bitmap, flipped, "bit " + std::to_string(bit));
          EXPECT(accepted == (bit < upper), "bit " << bit << " of " << upper << " low ones; " << Sizes(n, k));
        }
        for (const int64_t other : {k - 1, k + 1, 2 * k, k / 2, int64_t{1}, n}) {
          if (other == k || other < 1 || other > n) continue;
          const bool accepted = CheckVerdict(n, other, bitmap, good, "another k than " + std::to_string(k));
          EXPECT(!(bitmap && accepted), other << " of a bitmap of " << k);
        }
      }
    }
  }
}

}  // namespace
}  // namespace hvd_sparse
