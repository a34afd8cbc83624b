// Compares the functions for single elements, which CUDA threads use, with the core's own loops.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "checksum.h"
#include "elias_fano.h"
#include "entries.h"
#include "expect.h"
#include "hint.h"
#include "quantize.h"
#include "select.h"
#include "selection_key.h"
#include "update.h"

namespace hvd_sparse {
namespace {

constexpr CrcPowers kPowers = MakeCrcPowers();

uint32_t Remainder(const uint8_t* bytes, size_t size) {
  uint32_t remainder = 0;
  for (size_t i = 0; i < size; ++i) remainder = (remainder >> 8) ^ CrcOfByte((remainder ^ bytes[i]) & 0xffu);
  return remainder;
}

TEST(ChecksumsOfPartsAddUpToThatOfTheWhole) {
  std::mt19937_64 random(1);
  for (const size_t size : {1u, 8u, 255u, 256u, 257u, 1000u, 70'001u}) {
    std::vector<uint8_t> bytes(size);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    for (const size_t part : {1u, 7u, 256u, 4096u}) {
      if (part == 1 && size > 1000) continue;
      uint32_t sum = CrcShift(~0u, size, kPowers);
      for (size_t begin = 0; begin < size; begin += part) {
        const size_t end = std::min(size, begin + part);
        sum ^= CrcShift(Remainder(bytes.data() + begin, end - begin), size - end, kPowers);
      }
      EXPECT_EQ(Crc32(bytes.data(), size), ~sum, size << " bytes in parts of " << part);
    }
  }
}

TEST(FarShiftsAreManyNearOnes) {
  const uint32_t start = 0x12345678u;
  const uint64_t far = (uint64_t{1} << 49) + 12'345;
  const uint32_t half = CrcShift(start, far / 3, kPowers);
  EXPECT_EQ(CrcShift(start, far, kPowers), CrcShift(half, far - far / 3, kPowers), "a shift in two steps");
  EXPECT_EQ(start, CrcShift(start, 0, kPowers), "no shift");
}

template <typename T>
std::vector<int64_t> SelectedByKeys(const std::vector<T>& values, int64_t k, uint64_t seed) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const uint64_t first = SelectionKey(values[static_cast<size_t>(a)]);
    const uint64_t second = SelectionKey(values[static_cast<size_t>(b)]);
    return first != second ? first > second : TieKey(first, seed, a) < TieKey(second, seed, b);
  });
  order.resize(static_cast<size_t>(k));
  std::sort(order.begin(), order.end());
  return order;
}

template <typename T>
void CheckKeys(const std::vector<T>& values, DType dtype) {
  const auto n = static_cast<int64_t>(values.size());
  for (const int64_t k : {int64_t{1}, n / 7, n / 2, n - 3, n}) {
    Selection selection;
    const Array array{values.data(), n, dtype};
    EXPECT_STATUS(StatusKind::kOk, SelectTopK(array, {k, 0, 9}, SerialFor, &selection), "k = " << k);
    EXPECT_EQ(selection.indices, SelectedByKeys(values, k, 9), "k = " << k << " of " << n);
    double smallest = std::numeric_limits<double>::infinity();
    for (const int64_t i : selection.indices) {
      smallest = std::min(smallest, MagnitudeOfKey<T>(SelectionKey(values[static_cast<size_t>(i)])));
    }
    EXPECT_EQ(selection.threshold, smallest, "k = " << k);
  }
}

TEST(KeysSpellTheOrderOfSelection) {
  std::mt19937_64 random(2);
  const float special[] = {0.0f, -0.0f, 1.0f, -1.0f, 1e-45f, -1e-45f, 65504.0f, INFINITY, -INFINITY, NAN};
  std::vector<float> wide;
  std::vector<double> wider;
  std::vector<Float16> half;
  std::vector<BFloat16> brain;
  for (int i = 0; i < 2000; ++i) {
    wide.push_back(special[random() % 10]);
    wider.push_back(special[random() % 10]);
    half.push_back(ToFloat16(special[random() % 10]));
    brain.push_back(ToBFloat16(special[random() % 10]));
  }
  CheckKeys(wide, DType::kFloat32);
  CheckKeys(wider, DType::kFloat64);
  CheckKeys(half, DType::kFloat16);
  CheckKeys(brain, DType::kBFloat16);
}

std::vector<int64_t> DrawIndices(int64_t n, int64_t k, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> all(static_cast<size_t>(n));
  std::iota(all.begin(), all.end(), int64_t{0});
  std::shuffle(all.begin(), all.end(), random);
  all.resize(static_cast<size_t>(k));
  std::sort(all.begin(), all.end());
  return all;
}

TEST(EntriesAreCodedOneByOneAsTheyAreInARow) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {70'000, 3}, {70'000, 700}, {200'000, 70'000}}) {
    const std::vector<int64_t> indices = DrawIndices(n, k, 3);
    std::vector<uint32_t> counts(static_cast<size_t>(BlockCount(n)));
    std::vector<uint16_t> runs(static_cast<size_t>(k));
    EXPECT_STATUS(StatusKind::kOk, EncodeRunLength(indices.data(), k, n, counts.data(), runs.data()), "n = " << n);
    for (int64_t j = 0; j < k; ++j) {
      EXPECT_EQ(runs[static_cast<size_t>(j)], RunBefore(indices.data(), j), "entry " << j << " of " << k);
      EXPECT(Ascends(indices.data(), j, n), "entry " << j);
    }
    for (int64_t block = 0; block < BlockCount(n); ++block) {
      const int64_t end = CountBelow(indices.data(), k, (block + 1) * kBlock);
      const int64_t count = end - CountBelow(indices.data(), k, block * kBlock);
      EXPECT_EQ(static_cast<int64_t>(counts[static_cast<size_t>(block)]), count, "block " << block);
    }
  }
}

TEST(LowBitsAreCodedByteByByte) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{70'000, 1}, {70'000, 3}, {70'000, 700}, {9000, 4000}}) {
    const std::vector<int64_t> indices = DrawIndices(n, k, 4);
    std::vector<uint8_t> section(static_cast<size_t>(EliasFanoSize(n, k)));
    EncodeEliasFano(indices.data(), k, n, section.data());
    const int low = EliasFanoLowBits(n, k);
    const int64_t bytes = EliasFanoLowerSize(n, k);
    for (int64_t at = 0; at < bytes; ++at) {
      EXPECT_EQ(section[static_cast<size_t>(at)], LowBitsByte(indices.data(), k, low, at), "byte " << at);
    }
    for (int64_t j = 0; j < k; ++j) {
      const auto expected = static_cast<uint64_t>(indices[static_cast<size_t>(j)]) & ((uint64_t{1} << low) - 1);
      EXPECT_EQ(expected, LowBitsOf(section.data(), bytes, low, j), "entry " << j);
    }
  }
}

TEST(OrderIsChecked) {
  const int64_t indices[] = {0, 5, 5, 4, 9, 10};
  const bool expected[] = {true, true, false, false, true, false};
  for (int64_t j = 0; j < 6; ++j) EXPECT_EQ(expected[j], Ascends(indices, j, 10), "entry " << j);
  const int64_t below[] = {-1};
  EXPECT(!Ascends(below, 0, 10), "a negative index");
}

TEST(WhatComesInIsFiniteOrZero) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float largest = std::numeric_limits<float>::max();
  const auto check = [](float expected, bool is_finite, auto gradient, float factor, float parameter, bool decays) {
    bool finite = true;
    EXPECT_EQ(expected, Incoming(gradient, factor, parameter, 0.5f, decays, &finite), "factor " << factor);
    EXPECT_EQ(is_finite, finite, "factor " << factor);
  };
  check(3.0f, true, 1.5f, 2.0f, 8.0f, false);
  check(7.0f, true, 1.5f, 2.0f, 8.0f, true);
  check(0.0f, false, infinity, 2.0f, 8.0f, false);
  check(4.0f, false, -infinity, 2.0f, 8.0f, true);
  check(0.0f, false, largest, 2.0f, 8.0f, false);
  check(0.0f, false, 1.0f, 2.0f, infinity, true);
  check(0.0f, false, 1e300, 1.0f, 0.0f, false);
}

TEST(HintsLearn) {
  Hint hint{0.0, kFirstMargin, 0.0};
  EXPECT_EQ(0.0, HintFor(hint, 100), "at first");
  LearnHint(&hint, 100, 2.0, 100);
  EXPECT_EQ(2.0 * kFirstMargin, HintFor(hint, 100), "after a step");
  EXPECT_EQ(0.0, HintFor(hint, 101), "of another k");
  LearnHint(&hint, 100, 3.0, 99);
  EXPECT_EQ(1.0 - 2.0 * (1.0 - kFirstMargin), hint.margin, "after a miss");
  for (int step = 0; step < 20; ++step) LearnHint(&hint, 100, 3.0, 0);
  EXPECT_EQ(kLowestMargin, hint.margin, "after many misses");
  LearnHint(&hint, 100, 3.0, 142);
  EXPECT_EQ(1.0 - 0.9 * (1.0 - kLowestMargin), hint.margin, "after a crowd");
  for (int step = 0; step < 100; ++step) LearnHint(&hint, 100, 3.0, 1000);
  EXPECT_EQ(kHighestMargin, hint.margin, "after many crowds");
  LearnHint(&hint, 100, 3.0, 141);
  EXPECT_EQ(kHighestMargin, hint.margin, "a few more are no crowd");
}

}  // namespace
}  // namespace hvd_sparse
