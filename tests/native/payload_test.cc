#include "payload.h"

#include <limits>
#include <tuple>

#include "verdict.h"

namespace hvd_sparse {
namespace {

// Packs into a buffer of exactly PayloadSize bytes, compares every byte, and decodes it.
void CheckPack(const PayloadFormat& format, const std::vector<int64_t>& indices, uint64_t seed) {
  const std::string where = Describe(format) + ", " + std::to_string(indices.size()) + " entries";
  const Content content = MakeContent(format, indices, seed);
  const Bytes expected = BuildPayload(format, content);
  int64_t size = -1;
  EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), where);
  EXPECT_EQ(static_cast<int64_t>(expected.size()), size, where);
  if (static_cast<int64_t>(expected.size()) != size) return;
  const std::unique_ptr<uint8_t[]> packed(new uint8_t[expected.size()]);
  std::fill_n(packed.get(), expected.size(), uint8_t{0xA5});
  const WideValues wide(format.dtype, content.values);
  EXPECT_STATUS(StatusKind::kOk,
                Pack(format, indices.data(), wide.get(), static_cast<int64_t>(indices.size()), packed.get()), where);
  EXPECT_BYTES(expected, packed.get(), where);
  EXPECT(CheckVerdict(format, Bytes(packed.get(), packed.get() + expected.size()), where), where);
}

TEST(PacksTheDocumentedBytes) {
  const int64_t sizes[] = {1, 2, 7, 1000, 65535, 65536, 65537, 131072, 9 * 65536 + 1};
  for (const DType dtype : kDTypes) {
    for (const int64_t n : sizes) {
      for (const int64_t k : {int64_t{1}, int64_t{2}, int64_t{5}, n / 100, n / 2}) {
        if (k < 1 || k > n || k > 70000 || !expect::Chosen(4)) continue;
        const PayloadFormat format{n, k, Coding::kRunLength, dtype};
        CheckPack(format, ChooseIndices(n, k, static_cast<uint64_t>(n + k)), 1);
        CheckPack(format, Consecutive(n - k, k), 2);
        CheckPack(format, {}, 3);
      }
    }
    for (const int64_t n : {1, 2, 3, 65}) CheckPack({n, n, Coding::kRunLength, dtype}, Consecutive(0, n), 4);
  }
}

TEST(PacksTheDocumentedBytesInEveryCoding) {
  for (const Coding coding : kCodings) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kNone}) {
      for (const int64_t n : {1, 2, 7, 63, 64, 65, 1000, 65535, 65536, 65537, 131080}) {
        for (const int64_t k : {int64_t{1}, int64_t{5}, n / 1000, n / 2, n - 1, n}) {
          if (k < 1 || k > n || (k > 1000 && ItemSize(dtype) > 2) || !expect::Chosen(5)) continue;
          const PayloadFormat format{n, k, coding, dtype};
          CheckPack(format, ChooseIndices(n, k, static_cast<uint64_t>(n + k)), 1);
          CheckPack(format, Consecutive(0, k), 2);
          CheckPack(format, Consecutive(n - k, k), 3);
          CheckPack(format, {}, 4);
        }
      }
    }
  }
}

// Coding 2 with a byte of low bits of 1, 4 and 9 (1, 0, 1) and one of the rest (0, 2, 4: bits 0, 3, 6); coding 3.
TEST(PacksBytesWorkedOutByHand) {
  const std::vector<int64_t> indices{1, 4, 9};
  const std::tuple<Coding, uint8_t, uint8_t, uint8_t> cases[] = {
      {Coding::kEliasFano, 2, 0x05, 0x49}, {Coding::kBitmap, 3, 0x12, 0x02}, {Coding::kAuto, 3, 0x12, 0x02}};
  for (const auto& [coding, number, first, second] : cases) {
    const PayloadFormat format{10, 3, coding, DType::kNone};
    Bytes payload(40, 0xA5), expected{'H', 'V', 'D', 'S', 1, number, 4, 0, 10, 0, 0, 0, 0, 0, 0, 0, 3};
    EXPECT_STATUS(StatusKind::kOk, Pack(format, indices.data(), nullptr, 3, payload.data()), Describe(format));
    expected.resize(32);
    expected.insert(expected.end(), {first, second, 0, 0, 0, 0, 0, 0});
    Seal(&expected);
    EXPECT_BYTES(expected, payload.data(), Describe(format));
  }
}

TEST(NoHeaderSaysAuto) {
  for (const DType dtype : {DType::kFloat32, DType::kInt1}) {
    for (const int64_t n : {1, 2, 9, 1000, 65537}) {
      for (const int64_t k : {int64_t{1}, n / 1000, n / 3, n - 1, n}) {
        if (k < 1) continue;
        for (const auto& indices : {Consecutive(0, k), Consecutive(0, 0)}) {
          const PayloadFormat format{n, k, Coding::kAuto, dtype};
          Bytes payload(PartsOf(format).end);
          const std::vector<float> ones(indices.size(), 1.0f);
          const auto entries = static_cast<int64_t>(indices.size());
          EXPECT_STATUS(StatusKind::kOk, Pack(format, indices.data(), ones.data(), entries, payload.data()),
                        Describe(format));
          EXPECT(payload[kCodingAt] <= 3, "coding " << +payload[kCodingAt] << "; " << Describe(format));
          const PayloadFormat named{n, k, static_cast<Coding>(payload[kCodingAt]), dtype};
          EXPECT(CheckVerdict(named, payload, Describe(named)), "auto read by its name; " << Describe(named));
          EXPECT(CheckVerdict(format, payload, Describe(format)), "auto read as such; " << Describe(format));
        }
      }
    }
  }
}

TEST(PacksFullBlocks) {
  const auto check = [](int64_t n, const std::vector<int64_t>& indices, DType dtype) {
    CheckPack({n, static_cast<int64_t>(indices.size()), Coding::kRunLength, dtype}, indices, 5);
  };
  check(65535, Consecutive(0, 65535), DType::kFloat16);
  check(65536, Consecutive(0, 65535), DType::kFloat32);                  // one short of full: no bitmap
  check(65536, Consecutive(0, 65536), DType::kBFloat16);                 // k == n
  check(65537, Consecutive(0, 65537), DType::kFloat64);                  // k == n, and a last block of one
  check(131072, Consecutive(0, 131072), DType::kFloat16);                // two full blocks
  check(3 * 65536, Consecutive(65536, 65536), DType::kFloat32);          // the middle one of three
  check(3 * 65536, Consecutive(65535, 65538), DType::kFloat16);          // and an element on either side
  check(131072, Consecutive(1, 65536), DType::kBFloat16);                // a bitmap, but none full
  check(9 * 65536 + 3, Consecutive(8 * 65536, 65539), DType::kFloat32);  // a second byte of bitmap
  CheckPack({131072, 65536, Coding::kRunLength, DType::kFloat16}, {}, 6);
}

// Segments for the levels of n elements: all together, per channel, per row, several matrices.
std::vector<Segments> LayoutsOf(int64_t n) {
  std::vector<Segments> layouts{{}, {{0, 1}}, {{0, n}}, {{0, (n + 2) / 3}}};
  if (n >= 4) layouts.push_back({{0, 1}, {1, n / 4}, {n / 2, 1}, {n - 1, 1}});
  return layouts;
}

TEST(PacksLowBitValues) {
  for (const DType dtype : {DType::kInt2, DType::kInt1}) {
    for (const int64_t n : {1, 2, 9, 1000, 65537, 131080}) {
      for (const Segments& segments : LayoutsOf(n)) {
        for (const int64_t k : {int64_t{1}, int64_t{2}, int64_t{9}, n / 2}) {
          for (const Coding coding : kCodings) {
            if (k < 1 || k > n || (k > 9 && n > 65537 && coding != Coding::kRunLength)) continue;
            if (!expect::Chosen(5)) continue;
            const PayloadFormat format{n, k, coding, dtype, segments};
            CheckPack(format, ChooseIndices(n, k, static_cast<uint64_t>(n + k)), 1);
            CheckPack(format, Consecutive(n - k, k), 2);
            CheckPack(format, {}, 3);
          }
        }
      }
    }
    CheckPack({131072, 65537, Coding::kRunLength, dtype, {{0, 7}, {70000, 3}}}, Consecutive(9, 65537), 4);  // a bitmap
  }
}

TEST(PacksAllElementsWithoutPlaces) {
  for (const DType dtype : kWithLowBit) {
    for (const int64_t n : {1, 2, 9, 1000, 65535, 65536, 65537, 131080}) {
      for (const Segments& segments : CodeBitsOf(dtype) > 0 ? LayoutsOf(n) : std::vector<Segments>{{}}) {
        if (!expect::Chosen(4)) continue;
        CheckPack({n, n, Coding::kDense, dtype, segments}, Consecutive(0, n), 1);
        CheckPack({n, n, Coding::kDense, dtype, segments}, {}, 2);
      }
    }
  }
}

TEST(SizesWorkedOutByHand) {
  const auto size_of = [](int64_t n, int64_t k, DType dtype) {
    int64_t size = -1;
    EXPECT_STATUS(StatusKind::kOk, PayloadSize({n, k, Coding::kRunLength, dtype}, &size), "n = " << n);
    return size;
  };
  EXPECT_EQ(int64_t{40}, size_of(1, 1, DType::kFloat32), "32 + 2 + 2 + 4");
  EXPECT_EQ(int64_t{40}, size_of(1, 1, DType::kFloat16), "32 + 2 + 2 + 2, to 8");
  EXPECT_EQ(int64_t{48}, size_of(1, 1, DType::kFloat64), "32 + 2 + 2, to 8, + 8");
  EXPECT_EQ(int64_t{48}, size_of(65537, 1, DType::kFloat32), "32 + 4 + 2, to 4, + 4, to 8");
  EXPECT_EQ(int64_t{32 + 32 + 2000 + 4000}, size_of(1000000, 1000, DType::kFloat32), "16 blocks");
  const int64_t most = int64_t{1} << 48, blocks = int64_t{1} << 32;
  EXPECT_EQ(32 + 2 * blocks + 8 + 8, size_of(most, 1, DType::kFloat64), "the largest n");
  EXPECT_EQ(32 + 2 * blocks + blocks / 8 + 2 * most + 8 * most, size_of(most, most, DType::kFloat64), "all of it");
  EXPECT_EQ(int64_t{32 + 2 + 2 + 4 * 65536 + 4}, size_of(65536, 65536, DType::kBFloat16), "one byte of bitmap, to 2");
  EXPECT_EQ(int64_t{48}, size_of(100, 3, DType::kInt1), "32 + 2 + 6 + 4 + 1, to 8");
  EXPECT_EQ(int64_t{56}, size_of(100, 4, DType::kInt1), "32 + 2 + 8, to 4, + 4 + 1, to 8");
  EXPECT_EQ(int64_t{56}, size_of(100, 3, DType::kInt2), "32 + 2 + 6 + 8 + 1, to 8");
}

TEST(SizesOfEveryCodingWorkedOutByHand) {
  const auto size_of = [](int64_t n, int64_t k, Coding coding, DType dtype) {
    int64_t size = -1;
    EXPECT_STATUS(StatusKind::kOk, PayloadSize({n, k, coding, dtype}, &size), "n = " << n);
    return size;
  };
  const Coding fano = Coding::kEliasFano, bitmap = Coding::kBitmap, least = Coding::kAuto;
  EXPECT_EQ(int64_t{40}, size_of(10, 3, fano, DType::kNone), "32 + 1 + 1, to 8");
  EXPECT_EQ(int64_t{48}, size_of(10, 3, fano, DType::kFloat32), "34, to 4, + 12");
  EXPECT_EQ(int64_t{64}, size_of(10, 3, fano, DType::kFloat64), "34, to 8, + 24");
  EXPECT_EQ(int64_t{40}, size_of(10, 3, bitmap, DType::kFloat16), "32 + 2 + 6");
  EXPECT_EQ(int64_t{48}, size_of(17, 3, bitmap, DType::kFloat16), "32 + 3, to 2, + 6, to 8");
  EXPECT_EQ(int64_t{32 + 38250 + 51200 + 6}, size_of(25600000, 25600, fano, DType::kFloat16), "28,800 + 9,450, to 8");
  EXPECT_EQ(int64_t{32 + 3200000 + 102400}, size_of(25600000, 25600, bitmap, DType::kFloat32), "a bit an element");
  EXPECT_EQ(int64_t{32 + 38250 + 2 + 102400 + 4}, size_of(25600000, 25600, least, DType::kFloat32), "Elias-Fano");
  EXPECT_EQ(int64_t{32 + 3200000}, size_of(25600000, 12800000, least, DType::kNone), "a bitmap");
  EXPECT_EQ(int64_t{32 + 40}, size_of(9, 9, least, DType::kFloat32), "dense: 36, to 8");
  const int64_t most = int64_t{1} << 48;
  EXPECT_EQ(int64_t{32 + 8 + 8}, size_of(most, 1, fano, DType::kFloat64), "47 low bits and 2");
  EXPECT_EQ(32 + most / 4, size_of(most, most, fano, DType::kNone), "2^49 - 1 bits");
  EXPECT_EQ(32 + most / 8 + 8 * most, size_of(most, most, bitmap, DType::kFloat64), "a bit and 8 bytes each");
}

TEST(SizesOfDensePayloadsWorkedOutByHand) {
  const auto size_of = [](int64_t n, DType dtype, const Segments& segments) {
    int64_t size = -1;
    EXPECT_STATUS(StatusKind::kOk, PayloadSize({n, n, Coding::kDense, dtype, segments}, &size), "n = " << n);
    return size;
  };
  EXPECT_EQ(int64_t{32 + 40}, size_of(9, DType::kFloat32, {}), "36, to 8");
  EXPECT_EQ(int64_t{32 + 24}, size_of(9, DType::kFloat16, {}), "18, to 8");
  EXPECT_EQ(int64_t{32}, size_of(9, DType::kNone, {}), "nothing");
  EXPECT_EQ(int64_t{32 + 8}, size_of(9, DType::kInt1, {}), "4 + 2, to 8");
  EXPECT_EQ(int64_t{32 + 16}, size_of(9, DType::kInt2, {}), "8 + 3, to 8");
  EXPECT_EQ(int64_t{32 + 24}, size_of(9, DType::kInt1, {{0, 3}, {6, 2}}), "5 * 4 + 2, to 8");
  EXPECT_EQ(int64_t{32 + 200000}, size_of(1600000 - 32, DType::kInt1, {}), "4 + 199,996");
}

TEST(RefusesDensePayloadsOfFewer) {
  for (const DType dtype : kWithLowBit) {
    for (const int64_t k : {1, 4, 6, 0}) {
      const PayloadFormat format{5, k, Coding::kDense, dtype};
      const std::vector<int64_t> indices = Consecutive(0, k);
      const double values[6] = {};
      int64_t size = -1;
      uint8_t nothing = 0;
      PayloadView view;
      EXPECT_STATUS(StatusKind::kInvalidArgument, PayloadSize(format, &size), Describe(format));
      EXPECT_STATUS(StatusKind::kInvalidArgument, Pack(format, indices.data(), values, k, &nothing), Describe(format));
      EXPECT_STATUS(StatusKind::kInvalidArgument, Validate(format, &nothing, 40, &view), Describe(format));
    }
  }
}

TEST(RefusesImpossibleFormats) {
  const int64_t lowest = std::numeric_limits<int64_t>::min(), highest = std::numeric_limits<int64_t>::max();
  const int64_t most = int64_t{1} << 48;
  const std::pair<int64_t, int64_t> wrong[] = {{0, 0},         {0, 1},           {5, 0},       {5, 6},
                                               {5, -1},        {-5, 1},          {-5, -5},     {-1, 0},
                                               {100, highest}, {lowest, lowest}, {highest, 1}, {highest, highest},
                                               {most + 1, 1},  {lowest, 1}};
  for (const auto& [n, k] : wrong) {
    for (const Coding coding : kCodings) {
      const PayloadFormat format{n, k, coding, DType::kFloat32};
      int64_t size = -1;
      uint8_t nothing = 0;
      PayloadView view;
      EXPECT_STATUS(StatusKind::kInvalidArgument, PayloadSize(format, &size), Describe(format));
      EXPECT_STATUS(StatusKind::kInvalidArgument, Pack(format, nullptr, nullptr, 0, &nothing), Describe(format));
      EXPECT_STATUS(StatusKind::kInvalidArgument, Validate(format, &nothing, 0, &view), Describe(format));
    }
  }
}

TEST(PackRefusesWrongEntries) {
  const float values[5] = {1, 2, 3, 4, 5};
  const int64_t ascending[] = {1, 2, 3, 4, 5}, top = std::numeric_limits<int64_t>::max();
  const int64_t wrong[][3] = {{1, 1, 2}, {2, 1, 3},   {-1, 0, 1},  {0, 1, 70000}, {65536, 65535, 65537},
                              {0, 0, 0}, {0, 1, top}, {-top, 0, 1}};
  for (const Coding coding : kCodings) {
    const PayloadFormat format{70000, 3, coding, DType::kFloat32};
    Bytes payload(PartsOf(format).end, 0xA5);
    const Bytes before = payload;
    for (const int64_t entries : {int64_t{1}, int64_t{2}, int64_t{4}, int64_t{-1}, int64_t{-3}}) {
      EXPECT_STATUS(StatusKind::kInvalidArgument, Pack(format, ascending, values, entries, payload.data()),
                    entries << " entries; " << Describe(format));
    }
    for (const auto& indices : wrong) {
      EXPECT_STATUS(StatusKind::kInvalidArgument, Pack(format, indices, values, 3, payload.data()),
                    "first " << indices[0] << "; " << Describe(format));
    }
    EXPECT_EQ(before, payload, Describe(format));
  }
}

TEST(PackWritesNothingWhenItRefuses) {
  const Segments channels{{0, 2}};
  const std::vector<int64_t> good{0, 1, 2}, falling{0, 2, 1};
  const std::vector<float> two_levels{1, -2, 1}, three_levels{1, -2, 3};
  const auto check = [](const PayloadFormat& format, const std::vector<int64_t>& indices,
                        const std::vector<float>& values) {
    Bytes payload(PartsOf(format).end, 0xA5);
    const Bytes before = payload;
    const auto entries = static_cast<int64_t>(indices.size());
    EXPECT_STATUS(StatusKind::kInvalidArgument, Pack(format, indices.data(), values.data(), entries, payload.data()),
                  Describe(format));
    EXPECT_EQ(before, payload, Describe(format));
  };
  for (const Coding coding : {Coding::kRunLength, Coding::kDense, Coding::kEliasFano, Coding::kBitmap, Coding::kAuto}) {
    check({3, 3, coding, DType::kInt2}, good, three_levels);
    check({3, 3, coding, DType::kInt1}, good, two_levels);
    check({3, 3, coding, DType::kInt1, channels}, good, three_levels);
    for (const DType dtype : {DType::kFloat32, DType::kInt2}) {
      check({3, 3, coding, dtype}, falling, two_levels);
      check({3, 3, coding, dtype}, {0, 1}, two_levels);
      check({3, 3, coding, dtype}, {0, 1, 3}, two_levels);
    }
  }
}

}  // namespace
}  // namespace hvd_sparse
