#include "mask.h"

#include <memory>
#include <string>
#include <vector>

#include "arrays.h"
#include "expect.h"
#include "payloads.h"

namespace hvd_sparse {
namespace {

using Mask = std::unique_ptr<uint8_t[]>;

Mask DrawMask(int64_t n, uint64_t of_thousand, uint64_t seed) {
  std::mt19937_64 random(seed);
  Mask mask(new uint8_t[static_cast<size_t>(n)]);
  for (int64_t i = 0; i < n; ++i) mask[static_cast<size_t>(i)] = random() % 1000 < of_thousand;
  return mask;
}

// The format of a payload of `kept` of n elements; if kept is 0, of an empty one.
PayloadFormat RowsFormat(int64_t n, int64_t kept, Coding coding, DType dtype) {
  return {n, std::max<int64_t>(1, kept), coding, dtype, {}};
}

std::vector<int64_t> IndicesOf(const Mask& mask, int64_t n) {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < n; ++i) {
    if (mask[static_cast<size_t>(i)] != 0) indices.push_back(i);
  }
  return indices;
}

uint64_t BitsAt(const Values& values, int64_t i) {
  uint64_t bits = 0;
  const auto width = static_cast<size_t>(ItemSize(values.dtype()));
  std::memcpy(&bits, static_cast<const uint8_t*>(values.array().data) + static_cast<size_t>(i) * width, width);
  return bits;
}

// Packs the selected values with Pack, with or without positions.
std::vector<uint8_t> PackOneByOne(const PayloadFormat& format, const Values& values, const Mask& mask, bool places) {
  std::vector<int64_t> indices = IndicesOf(mask, values.size());
  std::vector<uint64_t> bits;
  for (const int64_t i : indices) bits.push_back(BitsAt(values, i));
  const auto kept = static_cast<int64_t>(indices.size());
  if (!places) indices = Consecutive(0, kept);
  int64_t size = 0;
  EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "size");
  std::vector<uint8_t> payload(static_cast<size_t>(size));
  const WideValues wide(format.dtype, bits);
  EXPECT_STATUS(StatusKind::kOk, Pack(format, indices.data(), wide.get(), kept, payload.data()), "pack");
  return payload;
}

// The selected values have the requested width; all others are zero.
void CheckValues(const Values& values, const Mask& mask, const std::vector<uint8_t>& found) {
  const DType dtype = values.dtype();
  const auto width = static_cast<size_t>(ItemSize(dtype));
  for (int64_t i = 0; i < values.size(); ++i) {
    uint64_t bits = 0;
    std::memcpy(&bits, &found[static_cast<size_t>(i) * width], width);
    const double number = mask[static_cast<size_t>(i)] != 0 ? values.At(i) : 0.0;
    const double decoded = Decode(dtype, bits);
    EXPECT(number == decoded || (std::isnan(number) && std::isnan(decoded)), Name(dtype) << " at " << i);
  }
}

void CheckRows(const Values& values, const Mask& mask, Coding coding) {
  const int64_t n = values.size(), kept = CountKept(mask.get(), n);
  const PayloadFormat format = RowsFormat(n, kept, coding, values.dtype());
  std::vector<uint8_t> payload = PackOneByOne(format, values, mask, true);
  const std::vector<uint8_t> expected = payload;
  std::fill(payload.begin(), payload.end(), uint8_t{0xa5});
  EXPECT_STATUS(StatusKind::kOk, PackMasked(format, values.array(), mask.get(), payload.data()), kept << " of " << n);
  EXPECT(expected == payload, Name(values.dtype()) << ", " << Name(coding) << ", " << kept << " of " << n);
  std::vector<uint8_t> found(static_cast<size_t>(n * ItemSize(values.dtype())), 0xa5), places(found.size(), 7);
  EXPECT_STATUS(StatusKind::kOk,
                UnpackMasked(format, payload.data(), static_cast<int64_t>(payload.size()), found.data(), places.data()),
                kept << " of " << n);
  EXPECT(std::equal(mask.get(), mask.get() + n, places.begin()), kept << " of " << n);
  CheckValues(values, mask, found);
}

void CheckKept(const Values& values, const Mask& mask) {
  const int64_t n = values.size();
  const PayloadFormat format = KeptFormat(CountKept(mask.get(), n), values.dtype());
  std::vector<uint8_t> payload = PackOneByOne(format, values, mask, false);
  const std::vector<uint8_t> expected = payload;
  std::fill(payload.begin(), payload.end(), uint8_t{0xa5});
  EXPECT_STATUS(StatusKind::kOk, PackMaskedValues(format, values.array(), mask.get(), payload.data()), format.n);
  EXPECT(expected == payload, Name(values.dtype()) << ", " << format.n);
  std::vector<uint8_t> found(static_cast<size_t>(n * ItemSize(values.dtype())), 0xa5);
  EXPECT_STATUS(StatusKind::kOk,
                UnpackMaskedValues(values.dtype(), payload.data(), static_cast<int64_t>(payload.size()), mask.get(), n,
                                   found.data()),
                format.n);
  CheckValues(values, mask, found);
}

constexpr int64_t kSizes[] = {1, 7, 63, 64, 65, 1000, 70001};

TEST(ThereAndBack) {
  for (const DType dtype : kDTypes) {
    for (const int64_t n : kSizes) {
      const Values values = Draw(dtype, Pattern::kMixed, n, 2);
      for (const uint64_t of_thousand : {0u, 20u, 500u, 1000u}) {
        const Mask mask = DrawMask(n, of_thousand, 3);
        for (const Coding coding : kCodings) CheckRows(values, mask, coding);
        CheckKept(values, mask);
      }
    }
  }
}

TEST(AnyByteThatIsNotZeroKeeps) {
  constexpr int64_t kSize = 200;
  const Mask ones = DrawMask(kSize, 300, 4), others = DrawMask(kSize, 300, 4);
  for (int64_t i = 0; i < kSize; ++i) others[static_cast<size_t>(i)] *= static_cast<uint8_t>(1 + i % 255);
  EXPECT_EQ(CountKept(ones.get(), kSize), CountKept(others.get(), kSize), "count");
  std::vector<int64_t> found;
  ForEachSet(others.get(), kSize, [&](int64_t i) { found.push_back(i); });
  EXPECT_EQ(IndicesOf(ones, kSize), found, "places");
}

TEST(CountsMoreThanAByteCan) {
  const Mask mask = DrawMask(100'000, 1000, 5);
  EXPECT_EQ(int64_t{100'000}, CountKept(mask.get(), 100'000), "all");
}

TEST(RefusesWhatDoesNotFit) {
  const Values values = Draw(DType::kFloat16, Pattern::kSpread, 100, 6);
  const Mask mask = DrawMask(100, 200, 7), none = DrawMask(100, 0, 7);
  const int64_t kept = CountKept(mask.get(), 100);
  std::vector<uint8_t> payload(10'000);
  const auto pack = [&](const PayloadFormat& format, const Mask& with) {
    return PackMasked(format, values.array(), with.get(), payload.data());
  };
  EXPECT_STATUS(StatusKind::kInvalidArgument, pack(RowsFormat(99, kept, Coding::kAuto, DType::kFloat16), mask), "n");
  EXPECT_STATUS(StatusKind::kInvalidArgument, pack(RowsFormat(100, kept + 1, Coding::kAuto, DType::kFloat16), mask),
                "k");
  EXPECT_STATUS(StatusKind::kInvalidArgument, pack(RowsFormat(100, 2, Coding::kAuto, DType::kFloat16), none), "k");
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kNone, DType::kInt2}) {
    EXPECT_STATUS(StatusKind::kInvalidArgument, pack(RowsFormat(100, kept, Coding::kAuto, dtype), mask), Name(dtype));
  }
  EXPECT_STATUS(StatusKind::kInvalidArgument, pack(RowsFormat(100, kept, Coding::kDense, DType::kFloat16), mask),
                "dense");
}

// Every changed bit of a payload is detected, at least by the checksum, and nothing is written.
TEST(DamageIsNoticed) {
  const Values values = Draw(DType::kFloat32, Pattern::kSpread, 130, 8);
  const Mask mask = DrawMask(130, 100, 9);
  const int64_t kept = CountKept(mask.get(), 130);
  for (const Coding coding : kCodings) {
    const PayloadFormat format = RowsFormat(130, kept, coding, DType::kFloat32);
    const std::vector<uint8_t> payload = PackOneByOne(format, values, mask, true);
    for (size_t bit = 0; bit < 8 * payload.size(); ++bit) {
      std::vector<uint8_t> changed = payload;
      changed[bit / 8] = static_cast<uint8_t>(changed[bit / 8] ^ (1u << (bit % 8)));
      std::vector<float> found(130, 5.0f);
      std::vector<uint8_t> places(130, 7);
      EXPECT_STATUS(
          StatusKind::kCorruptPayload,
          UnpackMasked(format, changed.data(), static_cast<int64_t>(changed.size()), found.data(), places.data()),
          "bit " << bit);
      EXPECT(found == std::vector<float>(130, 5.0f) && places == std::vector<uint8_t>(130, 7), "bit " << bit);
    }
  }
}

TEST(PayloadsOfOtherMasks) {
  const Values values = Draw(DType::kFloat32, Pattern::kSpread, 130, 8);
  const Mask mask = DrawMask(130, 100, 9), none = DrawMask(130, 0, 9), more = DrawMask(130, 500, 9);
  const PayloadFormat format = KeptFormat(CountKept(mask.get(), 130), DType::kFloat32);
  const std::vector<uint8_t> payload = PackOneByOne(format, values, mask, false);
  std::vector<float> found(130);
  const auto unpack = [&](const std::vector<uint8_t>& bytes, const Mask& with, DType dtype) {
    return UnpackMaskedValues(dtype, bytes.data(), static_cast<int64_t>(bytes.size()), with.get(), 130, found.data());
  };
  EXPECT_STATUS(StatusKind::kOk, unpack(payload, mask, DType::kFloat32), "its own");
  EXPECT_STATUS(StatusKind::kCorruptPayload, unpack(payload, none, DType::kFloat32), "none");
  EXPECT_STATUS(StatusKind::kCorruptPayload, unpack(payload, more, DType::kFloat32), "more");
  EXPECT_STATUS(StatusKind::kCorruptPayload, unpack(payload, mask, DType::kFloat16), "another type");
  EXPECT_STATUS(StatusKind::kInvalidArgument, unpack(payload, mask, DType::kInt1), "a low-bit type");
  EXPECT_STATUS(StatusKind::kCorruptPayload, unpack({}, mask, DType::kFloat32), "no bytes");
  const std::vector<uint8_t> empty = PackOneByOne(KeptFormat(0, DType::kFloat32), values, none, false);
  Mask one = DrawMask(130, 0, 9);
  one[77] = 1;
  EXPECT_STATUS(StatusKind::kOk, unpack(empty, none, DType::kFloat32), "empty");
  EXPECT_STATUS(StatusKind::kCorruptPayload, unpack(empty, one, DType::kFloat32), "none, but one is kept");
  const std::vector<uint8_t> single = PackOneByOne(KeptFormat(1, DType::kFloat32), values, one, false);
  EXPECT_STATUS(StatusKind::kCorruptPayload, unpack(single, none, DType::kFloat32), "one, but none is kept");
}

}  // namespace
}  // namespace hvd_sparse
