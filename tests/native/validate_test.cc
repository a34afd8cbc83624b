// Damaged, truncated and invented payloads in every coding.
#include <limits>

#include "verdict.h"

namespace hvd_sparse {
namespace {

// Small payloads of every type and coding, most with three blocks, some empty, and dense payloads of every type.
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
    add({format.n, 13, Coding::kEliasFano, dtype}, ChooseIndices(format.n, 13, 8));
    add({101, 13, Coding::kBitmap, dtype}, ChooseIndices(101, 13, 9));
    if (CodeBitsOf(dtype) == 0) continue;
    add({format.n, 13, Coding::kEliasFano, dtype, matrices}, ChooseIndices(format.n, 13, 10));
    add({format.n, 13, Coding::kRunLength, dtype, matrices}, ChooseIndices(format.n, 13, 7));
    add({9, 9, Coding::kDense, dtype, {{0, 2}, {6, 1}}}, Consecutive(0, 9));
    add({format.n, 13, Coding::kRunLength, dtype, matrices}, {});
  }
  add({9, 9, Coding::kRunLength, DType::kFloat32}, Consecutive(0, 9));
  add({1000, 5}, {});
  add({9, 9, Coding::kDense}, {});
  add({1000, 5, Coding::kEliasFano, DType::kFloat16}, {});
  add({101, 13, Coding::kBitmap, DType::kInt2, {{0, 2}}}, {});
  add({1000, 5, Coding::kAuto}, ChooseIndices(1000, 5, 11));              // Elias-Fano
  add({30, 13, Coding::kAuto, DType::kInt1}, ChooseIndices(30, 13, 12));  // a bitmap
  add({9, 9, Coding::kAuto, DType::kFloat16}, Consecutive(0, 9));         // dense
  add({30, 13, Coding::kAuto}, {});
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
    // An empty contribution does not contain its k, so any k of the same size is accepted. No payload has its segments.
    const bool empty = ReadNumber(bytes, kEntriesAt, 8) == 0;
    for (int64_t k = 1; k <= std::min<int64_t>(200, format.n); ++k) {
      for (const int64_t n : {format.n - 1, format.n, format.n + 1, format.n + 65536, int64_t{65536}}) {
        for (const DType dtype : kWithLowBit) {
          for (const Coding coding : {kCodings[0], kCodings[1], kCodings[2], kCodings[3], Coding::kDense}) {
            const PayloadFormat other{n, coding == Coding::kDense ? n : k, coding, dtype};
            if (other.k > n || (coding == Coding::kDense && k > 1)) continue;
            const bool alike = n == format.n && dtype == format.dtype && CodingOf(other) == CodingOf(format);
            if (alike && (other.k == format.k || empty)) continue;
            EXPECT(!CheckVerdict(other, bytes, Describe(other)), Describe(other) << " for " << Describe(format));
          }
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
