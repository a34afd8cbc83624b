#include "payload.h"

#include <limits>

#include "expect.h"
#include "payloads.h"

namespace hvd_sparse {
namespace {

std::string Describe(const PayloadFormat& format) {
  return std::string(Name(format.dtype)) + (format.coding == Coding::kDense ? " dense" : "") +
         ", n = " + std::to_string(format.n) + ", k = " + std::to_string(format.k) + ", " +
         std::to_string(format.segments.size()) + " segments";
}

// Does `view` hold, and unpack to, these entries? Into exactly that much heap.
void CheckEntries(const PayloadFormat& format, const PayloadView& view, const std::vector<int64_t>& indices,
                  const std::vector<uint64_t>& values, const std::string& where) {
  EXPECT_EQ(static_cast<int64_t>(indices.size()), view.entries, where);
  if (static_cast<int64_t>(indices.size()) != view.entries) return;
  const size_t width = format.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  const std::unique_ptr<int64_t[]> unpacked(new int64_t[indices.size()]);
  const std::unique_ptr<uint8_t[]> wide(new uint8_t[indices.size() * width]);
  Unpack(format, view, unpacked.get(), wide.get());
  EXPECT(std::equal(indices.begin(), indices.end(), unpacked.get()), "the indices; " << where);
  for (size_t j = 0; j < values.size(); ++j) {
    const double expected = Decode(format.dtype, values[j]);
    double full = 0;
    float single = 0;
    std::memcpy(format.dtype == DType::kFloat64 ? static_cast<void*>(&full) : &single, &wide[j * width], width);
    const double received = format.dtype == DType::kFloat64 ? full : static_cast<double>(single);
    EXPECT(SameNumber(expected, received),
           "value " << j << " is " << received << ", not " << expected << "; " << where);
    const float at = ValueAt(view, format.dtype, static_cast<int64_t>(j));
    EXPECT(SameNumber(static_cast<float>(expected), at), "ValueAt " << j << " is " << at << "; " << where);
  }
}

// Validate must say of an exact heap copy what ParsePayload says. Returns whether it was accepted.
bool CheckVerdict(const PayloadFormat& format, const Bytes& bytes, const std::string& where) {
  std::vector<int64_t> indices;
  std::vector<uint64_t> values;
  const bool good = ParsePayload(format, bytes, &indices, &values);
  const Exact copy(bytes);
  PayloadView view;
  const Status status = Validate(format, copy.get(), static_cast<int64_t>(bytes.size()), &view);
  EXPECT_STATUS(good ? StatusKind::kOk : StatusKind::kCorruptPayload, status, where);
  if (good && status.ok()) CheckEntries(format, view, indices, values, where);
  return status.ok();
}

// Packs into exactly the size that was promised, compares every byte, and reads it back.
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
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(expected[i], packed[i], "byte " << i << "; " << where);
  EXPECT(CheckVerdict(format, Bytes(packed.get(), packed.get() + expected.size()), where), where);
}

TEST(PacksTheDocumentedBytes) {
  const int64_t sizes[] = {1, 2, 7, 1000, 65535, 65536, 65537, 131072, 9 * 65536 + 1};
  for (const DType dtype : kDTypes) {
    for (const int64_t n : sizes) {
      for (const int64_t k : {int64_t{1}, int64_t{2}, int64_t{5}, n / 100, n / 2}) {
        if (k < 1 || k > n || k > 70000) continue;
        const PayloadFormat format{n, k, Coding::kRunLength, dtype};
        CheckPack(format, ChooseIndices(n, k, static_cast<uint64_t>(n + k)), 1);
        CheckPack(format, Consecutive(n - k, k), 2);
        CheckPack(format, {}, 3);
      }
    }
    for (const int64_t n : {1, 2, 3, 65}) CheckPack({n, n, Coding::kRunLength, dtype}, Consecutive(0, n), 4);
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

// What may share the centres of n elements: all, a column, a row, several matrices.
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
          if (k < 1 || k > n) continue;
          const PayloadFormat format{n, k, Coding::kRunLength, dtype, segments};
          CheckPack(format, ChooseIndices(n, k, static_cast<uint64_t>(n + k)), 1);
          CheckPack(format, Consecutive(n - k, k), 2);
          CheckPack(format, {}, 3);
        }
      }
    }
    CheckPack({131072, 65537, Coding::kRunLength, dtype, {{0, 7}, {70000, 3}}}, Consecutive(9, 65537), 4);  // a bitmap
  }
}

TEST(PacksAllElementsWithoutPlaces) {
  for (const DType dtype : kWithLowBit) {
    for (const int64_t n : {1, 2, 9, 1000, 65535, 65536, 65537, 131080}) {
      for (const Segments& segments : LevelsOf(dtype) > 0 ? LayoutsOf(n) : std::vector<Segments>{{}}) {
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
    const PayloadFormat format{n, k, Coding::kRunLength, DType::kFloat32};
    int64_t size = -1;
    uint8_t nothing = 0;
    PayloadView view;
    EXPECT_STATUS(StatusKind::kInvalidArgument, PayloadSize(format, &size), "n = " << n << ", k = " << k);
    EXPECT_STATUS(StatusKind::kInvalidArgument, Pack(format, nullptr, nullptr, 0, &nothing),
                  "n = " << n << ", k = " << k);
    EXPECT_STATUS(StatusKind::kInvalidArgument, Validate(format, &nothing, 0, &view), "n = " << n << ", k = " << k);
  }
}

TEST(PackRefusesWrongEntries) {
  const PayloadFormat format{70000, 3, Coding::kRunLength, DType::kFloat32};
  const float values[5] = {1, 2, 3, 4, 5};
  uint8_t payload[64];
  const int64_t ascending[] = {1, 2, 3, 4, 5};
  for (const int64_t entries : {int64_t{1}, int64_t{2}, int64_t{4}, int64_t{-1}, int64_t{-3}}) {
    EXPECT_STATUS(StatusKind::kInvalidArgument, Pack(format, ascending, values, entries, payload), entries);
  }
  const int64_t wrong[][3] = {{1, 1, 2}, {2, 1, 3}, {-1, 0, 1}, {0, 1, 70000}, {65536, 65535, 65537}, {0, 0, 0}};
  for (const auto& indices : wrong) {
    EXPECT_STATUS(StatusKind::kInvalidArgument, Pack(format, indices, values, 3, payload), "first " << indices[0]);
  }
}

TEST(PackWritesNothingWhenItRefuses) {
  const Segments columns{{0, 2}};
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
  for (const Coding coding : {Coding::kRunLength, Coding::kDense}) {
    check({3, 3, coding, DType::kInt2}, good, three_levels);
    check({3, 3, coding, DType::kInt1}, good, two_levels);
    check({3, 3, coding, DType::kInt1, columns}, good, three_levels);
    for (const DType dtype : {DType::kFloat32, DType::kInt2}) {
      check({3, 3, coding, dtype}, falling, two_levels);
      check({3, 3, coding, dtype}, {0, 1}, two_levels);
      check({3, 3, coding, dtype}, {0, 1, 3}, two_levels);
    }
  }
}

// Small payloads of every type, in three blocks, and one that holds nothing; all elements of every type.
std::vector<std::pair<PayloadFormat, Bytes>> SmallPayloads() {
  std::vector<std::pair<PayloadFormat, Bytes>> payloads;
  const auto add = [&](const PayloadFormat& format, const std::vector<int64_t>& indices) {
    payloads.emplace_back(format, BuildPayload(format, MakeContent(format, indices, 7)));
  };
  const Segments matrices{{0, 3}, {70000, 500}};
  for (const DType dtype : kWithLowBit) {
    const PayloadFormat format{2 * 65536 + 10, 13, Coding::kRunLength, dtype}, full{9, 9, Coding::kDense, dtype};
    add(format, ChooseIndices(format.n, 13, 7));
    add(full, Consecutive(0, 9));
    if (LevelsOf(dtype) == 0) continue;
    add({format.n, 13, Coding::kRunLength, dtype, matrices}, ChooseIndices(format.n, 13, 7));
    add({9, 9, Coding::kDense, dtype, {{0, 2}, {6, 1}}}, Consecutive(0, 9));
    add({format.n, 13, Coding::kRunLength, dtype, matrices}, {});
  }
  add({9, 9, Coding::kRunLength, DType::kFloat32}, Consecutive(0, 9));
  add({1000, 5}, {});
  add({9, 9, Coding::kDense}, {});
  return payloads;
}

TEST(RefusesEveryOtherLength) {
  for (const auto& [format, bytes] : SmallPayloads()) {
    EXPECT(CheckVerdict(format, bytes, Describe(format)), "the whole payload; " << Describe(format));
    for (size_t size = 0; size < bytes.size() + 70; ++size) {
      if (size == bytes.size()) continue;
      const Exact copy(bytes, size);
      PayloadView view;
      EXPECT_STATUS(StatusKind::kCorruptPayload, Validate(format, copy.get(), static_cast<int64_t>(size), &view),
                    size << " bytes of " << bytes.size() << "; " << Describe(format));
    }
    PayloadView view;
    for (const int64_t size : {int64_t{-1}, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}) {
      EXPECT_STATUS(StatusKind::kCorruptPayload, Validate(format, bytes.data(), size, &view), size << " bytes");
    }
  }
}

TEST(RefusesEveryFlippedBit) {
  for (const auto& [format, bytes] : SmallPayloads()) {
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      Bytes flipped = bytes;
      flipped[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      EXPECT(!CheckVerdict(format, flipped, "bit " + std::to_string(bit) + "; " + Describe(format)), "bit " << bit);
    }
  }
}

TEST(EveryFlippedBitUnderARightChecksumGetsTheRightVerdict) {
  int accepted = 0, refused = 0;
  for (const auto& [format, bytes] : SmallPayloads()) {
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      Bytes flipped = bytes;
      flipped[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      Seal(&flipped);
      ++(CheckVerdict(format, flipped, "bit " + std::to_string(bit) + "; " + Describe(format)) ? accepted : refused);
    }
  }
  EXPECT(accepted > 1000 && refused > 1000, accepted << " accepted, " << refused << " refused");
}

TEST(RefusesAnyOtherFormat) {
  for (const auto& [format, bytes] : SmallPayloads()) {
    for (int64_t k = 1; k <= std::min<int64_t>(200, format.n); ++k) {
      for (const int64_t n : {format.n - 1, format.n, format.n + 1, format.n + 65536, int64_t{65536}}) {
        for (const DType dtype : kWithLowBit) {
          const PayloadFormat other{n, k, Coding::kRunLength, dtype}, dense{n, n, Coding::kDense, dtype};
          const bool alike = n == format.n && dtype == format.dtype && format.coding == Coding::kRunLength;
          // An empty contribution does not say its k: any k of the same size will do. Nor does any say its segments.
          const bool empty = ReadNumber(bytes, kEntriesAt, 8) == 0;
          if (k <= n && !(alike && (k == format.k || empty))) {
            EXPECT(!CheckVerdict(other, bytes, Describe(other)), Describe(other) << " for " << Describe(format));
          }
          if (n == format.n && dtype == format.dtype && format.coding == Coding::kDense) continue;
          if (k == 1) EXPECT(!CheckVerdict(dense, bytes, Describe(dense)), "dense for " << Describe(format));
        }
      }
    }
  }
}

TEST(RefusesLiesUnderARightChecksum) {
  for (const Lie& lie : AllLies()) EXPECT(!CheckVerdict(lie.format, lie.bytes, lie.name), lie.name);
}

TEST(RandomBytes) {
  std::mt19937_64 random(11);
  const std::vector<std::pair<PayloadFormat, Bytes>> payloads = SmallPayloads();
  for (int i = 0; i < 10000; ++i) {
    const auto& [format, bytes] = payloads[static_cast<size_t>(i) % payloads.size()];
    Bytes noise(random() % 8 == 0 ? random() % 300 : bytes.size());
    for (uint8_t& byte : noise) byte = static_cast<uint8_t>(random());
    EXPECT(!CheckVerdict(format, noise, "noise " + std::to_string(i)), "noise " << i);
    if (noise.size() != bytes.size()) continue;
    const size_t truth = random() % 2 == 0 ? kCountsAt : PartsOf(format).runs;  // a true beginning
    std::copy_n(bytes.begin(), truth, noise.begin());
    Seal(&noise);
    CheckVerdict(format, noise, "sealed noise " + std::to_string(i));
  }
}

TEST(RandomStructureUnderARightChecksumGetsTheRightVerdict) {
  std::mt19937_64 random(12);
  const PayloadFormat format = kLiar;
  const Bytes bytes = BuildPayload(format, MakeContent(format, ChooseIndices(format.n, format.k, 2), 2));
  int accepted = 0, refused = 0;
  for (int i = 0; i < 10000; ++i) {
    Bytes changed = bytes;
    uint64_t left = 12;
    for (size_t block = 0; block < 3; ++block) {  // counts that mostly sum to 12
      const uint64_t count = block == 2 ? left + (random() % 16 == 0 ? random() % 3 : 0) : random() % (left + 1);
      WriteNumber(&changed, kCountsAt + 2 * block, count, 2);
      left -= std::min(left, count);
    }
    for (size_t j = 0; j < 12; ++j) WriteNumber(&changed, kCountsAt + 6 + 2 * j, random() >> (48 + random() % 16), 2);
    Seal(&changed);
    ++(CheckVerdict(format, changed, "structure " + std::to_string(i)) ? accepted : refused);
  }
  EXPECT(accepted > 500 && refused > 500, accepted << " accepted, " << refused << " refused");
}

TEST(IgnoresPaddingUnderARightChecksum) {
  const PayloadFormat format{131072, 65537, Coding::kRunLength, DType::kFloat16};
  const Parts parts = PartsOf(format);
  Bytes bytes = BuildPayload(format, MakeContent(format, ChooseIndices(format.n, format.k, 3), 3));
  bytes[parts.bitmap] |= 0xfc;  // of two blocks
  bytes[parts.end - 1] = 1;
  Seal(&bytes);
  EXPECT(CheckVerdict(format, bytes, "padding"), "padding");
}

TEST(ReadsAtAnyAddress) {
  for (const auto& [format, bytes] : SmallPayloads()) {
    for (size_t offset = 1; offset < 8; ++offset) {
      Bytes shifted(offset, 0xff);
      shifted.insert(shifted.end(), bytes.begin(), bytes.end());
      const Exact copy(shifted);
      std::vector<int64_t> indices;
      std::vector<uint64_t> values;
      EXPECT(ParsePayload(format, bytes, &indices, &values), Describe(format));
      PayloadView view;
      const auto size = static_cast<int64_t>(bytes.size());
      const Status status = Validate(format, copy.get() + offset, size, &view);
      EXPECT_STATUS(StatusKind::kOk, status, "offset " << offset);
      if (status.ok()) CheckEntries(format, view, indices, values, "offset " + std::to_string(offset));
    }
  }
}

}  // namespace
}  // namespace hvd_sparse
