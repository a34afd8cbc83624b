// Valid and invalid payloads for tests, built by wire.h and not by the core.
#pragma once

#include <string>

#include "arrays.h"
#include "wire.h"

namespace hvd_sparse {

// The codings that allow any number of entries.
constexpr Coding kCodings[] = {Coding::kRunLength, Coding::kEliasFano, Coding::kBitmap, Coding::kAuto};

inline const char* Name(Coding coding) {
  static const char* const kNames[] = {"run_length", "dense", "elias_fano", "bitmap"};
  return coding == Coding::kAuto ? "auto" : kNames[static_cast<size_t>(coding)];
}

// Draws k of n indices, ascending; all subsets are equally likely.
inline std::vector<int64_t> ChooseIndices(int64_t n, int64_t k, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < n; ++i) {
    const auto wanted = static_cast<uint64_t>(k) - indices.size();
    if (random() % static_cast<uint64_t>(n - i) < wanted) indices.push_back(i);
  }
  return indices;
}

inline std::vector<int64_t> Consecutive(int64_t first, int64_t count) {
  std::vector<int64_t> indices;
  for (int64_t i = first; i < first + count; ++i) indices.push_back(i);
  return indices;
}

// Bits of any kind; of the 16-bit types only the one NaN that rounding makes.
inline uint64_t DrawWireBits(DType dtype, std::mt19937_64& random) {
  const Pattern pattern = random() % 4 == 0 ? Pattern::kMixed : Pattern::kSpread;
  const uint64_t bits = DrawBits(dtype, pattern, 0, 1, random);
  const Fields fields = FieldsOf(dtype);
  if (ItemSize(dtype) != 2 || !std::isnan(Decode(dtype, bits))) return bits;
  return (bits & fields.sign()) | fields.infinity() | ((fields.mantissa_mask() + 1) >> 1);
}

// Reduces each group to the magnitudes of its first one or two values, which a low-bit type can represent.
inline void KeepLevels(const PayloadFormat& format, const std::vector<int64_t>& indices,
                       std::vector<uint64_t>* values) {
  std::map<Group, std::vector<uint64_t>> magnitudes;
  for (size_t j = 0; j < indices.size(); ++j) {
    std::vector<uint64_t>& kept = magnitudes[GroupOf(format.segments, indices[j])];
    uint64_t& value = (*values)[j];
    if (kept.size() < CodeBitsOf(format.dtype)) kept.push_back(value & 0x7fffffffu);
    value = (value & 0x80000000u) | kept[value % kept.size()];
  }
}

inline Content MakeContent(const PayloadFormat& format, const std::vector<int64_t>& indices, uint64_t seed) {
  std::mt19937_64 random(seed);
  Content content;
  content.counts.assign(static_cast<size_t>((format.n + 65535) / 65536), 0u);
  int64_t place = 0;  // where the next entry would be with a run of 0
  for (const int64_t index : indices) {
    place = std::max(place, index / 65536 * 65536);
    content.runs.push_back(static_cast<uint16_t>(index - place));
    ++content.counts[static_cast<size_t>(index / 65536)];
    content.values.push_back(DrawWireBits(format.dtype, random));
    place = index + 1;
  }
  if (CodeBitsOf(format.dtype) > 0) KeepLevels(format, indices, &content.values);
  return content;
}

// The values as Pack takes them: float32, or float64 for that wire type.
class WideValues {
 public:
  WideValues(DType dtype, const std::vector<uint64_t>& bits) {
    for (const uint64_t value : bits) {
      if (dtype == DType::kFloat64) {
        AppendNumber(&bytes_, value, 8);
      } else if (dtype == DType::kFloat32 || CodeBitsOf(dtype) > 0) {
        AppendNumber(&bytes_, value, 4);
      } else {
        AppendNumber(&bytes_, FloatToBits(static_cast<float>(Decode(dtype, value))), 4);
      }
    }
  }
  const void* get() const { return bytes_.data(); }

 private:
  Bytes bytes_;
};

inline bool SameNumber(double expected, double received) {
  if (std::isnan(expected)) return std::isnan(received);
  return expected == received && std::signbit(expected) == std::signbit(received);
}

struct Lie {
  std::string name;
  PayloadFormat format;  // what the reader expects
  Bytes bytes;
};

// Of k = 12 in blocks of 65,536, 65,536 and 10.
inline const PayloadFormat kLiar{2 * 65536 + 10, 12, Coding::kRunLength, DType::kFloat32};

inline void AddHeaderLies(const Content& truth, std::vector<Lie>* lies) {
  const auto patch = [&](const std::string& name, size_t at, uint64_t number, int width) {
    Bytes bytes = BuildPayload(kLiar, truth);
    WriteNumber(&bytes, at, number, width);
    Seal(&bytes);
    lies->push_back({name + " " + std::to_string(number), kLiar, bytes});
  };
  const uint64_t n = static_cast<uint64_t>(kLiar.n), k = static_cast<uint64_t>(kLiar.k), top = uint64_t{1} << 63;
  for (const uint64_t entries : {uint64_t{1}, k - 1, k + 1, k + 65536, k + (uint64_t{1} << 32), n, top, top + k, ~top,
                                 ~uint64_t{0}, ~uint64_t{0} - k + 1}) {
    patch("entries", kEntriesAt, entries, 8);
  }
  patch("counts but no entries", kEntriesAt, 0, 8);
  for (const uint64_t wrong :
       {uint64_t{0}, uint64_t{1}, n - 1, n + 1, n + (uint64_t{1} << 32), top + n, ~uint64_t{0}}) {
    patch("n", kElementsAt, wrong, 8);
  }
  for (const uint64_t dtype : {1, 2, 3, 4, 255}) patch("dtype", kDTypeAt, dtype, 1);
  for (const uint64_t coding : {1, 2, 3, 4, 255}) patch("coding", kCodingAt, coding, 1);
  for (const uint64_t version : {0, 2, 255}) patch("version", 4, version, 1);
  for (const uint64_t magic : {0x53445649, 0, 0x48564453}) patch("magic", 0, magic, 4);
  for (int bit = 0; bit < 8; ++bit) patch("reserved", kZeroAt, uint64_t{1} << bit, 1);
  for (int bit = 0; bit < 32; ++bit) patch("reserved too", kZeroTooAt, uint64_t{1} << bit, 4);
}

inline void AddCountAndRunLies(std::vector<Lie>* lies) {
  std::vector<uint16_t> none(12, 0), first_long(12, 0), last_long(12, 0), two_halves(12, 0);
  first_long[0] = 65535;
  last_long[11] = 2;
  two_halves[0] = two_halves[1] = 32768;
  const auto add = [&](const char* name, const std::vector<uint32_t>& counts, const std::vector<uint16_t>& runs) {
    const Content content{counts, runs, std::vector<uint64_t>(12, 0x3f800000u)};
    lies->push_back({name, kLiar, BuildPayload(kLiar, content)});
  };
  add("counts sum to one too few", {5, 5, 1}, none);
  add("counts sum to one too many", {5, 5, 3}, none);
  add("no counts", {0, 0, 0}, none);
  add("everything counted twice", {12, 12, 0}, none);
  add("largest count", {65535, 0, 0}, none);
  add("largest counts", {65535, 65535, 65535}, none);
  add("a sum of 12 modulo 65,536", {65535, 13, 0}, none);
  add("more than the short last block", {1, 0, 11}, none);
  add("all in the short last block", {0, 0, 12}, none);
  add("a run past its block", {12, 0, 0}, first_long);
  add("a run past the middle block", {0, 12, 0}, first_long);
  add("two runs past a block", {12, 0, 0}, two_halves);
  add("a run past the short last block", {3, 0, 9}, last_long);
  add("a long run in the short last block", {0, 11, 1}, std::vector<uint16_t>(12, 10));
  add("the largest runs", {6, 6, 0}, std::vector<uint16_t>(12, 65535));
}

// Of k = 65,556 in blocks of 65,536, 65,536 and 5; the second is full.
inline void AddBitmapLies(std::vector<Lie>* lies) {
  const PayloadFormat format{2 * 65536 + 5, 65536 + 20, Coding::kRunLength, DType::kBFloat16};
  std::vector<int64_t> indices = Consecutive(65536 - 20, 20 + 65536);
  const Content truth = MakeContent(format, indices, 1);
  const size_t bitmap = PartsOf(format).bitmap;
  const auto add = [&](const char* name, uint8_t bits, uint64_t count0, uint64_t count1, uint64_t count2) {
    Bytes bytes = BuildPayload(format, truth);  // bits 2, counts 20, 0, 0
    bytes[bitmap] = bits;
    WriteNumber(&bytes, kCountsAt, count0, 2);
    WriteNumber(&bytes, kCountsAt + 2, count1, 2);
    WriteNumber(&bytes, kCountsAt + 4, count2, 2);
    Seal(&bytes);
    lies->push_back({name, format, bytes});
  };
  add("no block full", 0, 20, 0, 0);
  add("another block full, too", 3, 20, 0, 0);
  add("both blocks full", 3, 0, 0, 0);
  add("all blocks full", 7, 0, 0, 0);
  add("fuller than full", 2, 19, 1, 0);
  add("the fullest", 2, 0, 20, 0);
  add("full and the largest count", 2, 20, 65535, 0);
  add("a short block full", 4, 20, 0, 0);
  add("a short block full, too", 6, 20, 0, 0);
  add("the first block full, runs of the second", 1, 0, 20, 0);
  add("the largest counts", 7, 65535, 65535, 65535);
}

// Of k = 5 of 1000: 7 low bits each in 5 bytes, of which 35 bits are used, then 12 bits in 2 bytes.
inline void AddEliasFanoLies(std::vector<Lie>* lies) {
  const PayloadFormat format{1000, 5, Coding::kEliasFano, DType::kFloat32};
  const Content truth = MakeContent(format, {3, 130, 131, 600, 999}, 1);  // low bits 3, 2, 3, 88, 103; 0, 1, 1, 4, 7
  const auto add = [&](const char* name, uint64_t upper, const std::vector<uint64_t>& low) {
    Bytes bytes = BuildPayload(format, truth);
    uint64_t lower = 0;
    for (size_t j = 0; j < 5; ++j) lower |= low[j] << 7 * j;
    WriteNumber(&bytes, kCountsAt, lower, 5);
    WriteNumber(&bytes, kCountsAt + 5, upper, 2);
    Seal(&bytes);
    lies->push_back({std::string("Elias-Fano, ") + name, format, bytes});
  };
  const std::vector<uint64_t> low{3, 2, 3, 88, 103};
  add("no bits", 0, low);
  add("all bits", 0xffff, low);
  add("a bit too many", 0x88f, low);
  add("a bit too few", 0x88c, low);
  add("a bit moved to the padding", 0x108d, low);
  add("a bit more, in the padding", 0x188d, low);
  add("the last bit of the padding", 0x888d, low);
  add("twice the same", 0x88d, {3, 3, 3, 88, 103});
  add("falling", 0x88d, {3, 3, 2, 88, 103});
  add("element n", 0x88d, {3, 2, 3, 88, 104});
  add("the last that there could be", 0x88d, {3, 2, 3, 88, 127});
  Bytes bytes = BuildPayload(format, truth);
  WriteNumber(&bytes, kEntriesAt, 0, 8);
  Seal(&bytes);
  lies->push_back({"Elias-Fano, positions but no entries", format, bytes});
}

// Of k = 3 of 13: two bytes, of which three bits are padding.
inline void AddPlainBitmapLies(std::vector<Lie>* lies) {
  const PayloadFormat format{13, 3, Coding::kBitmap, DType::kFloat32};
  const auto add = [&](const char* name, uint64_t bits, uint64_t entries) {
    Bytes bytes = BuildPayload(format, MakeContent(format, {1, 4, 12}, 1));  // 0x1012
    WriteNumber(&bytes, kCountsAt, bits, 2);
    WriteNumber(&bytes, kEntriesAt, entries, 8);
    Seal(&bytes);
    lies->push_back({std::string("bitmap, ") + name, format, bytes});
  };
  add("no bits", 0, 3);
  add("all bits", 0xffff, 3);
  add("all elements", 0x1fff, 3);
  add("a bit too many", 0x1013, 3);
  add("a bit too few", 0x1010, 3);
  add("a bit moved to the padding", 0x2012, 3);
  add("a bit more, in the padding", 0x9012, 3);
  add("positions but no entries", 0x1012, 0);
  add("padding but no entries", 0x8000, 0);
}

// Invalid payloads with correct checksums.
inline std::vector<Lie> AllLies() {
  std::vector<Lie> lies;
  AddHeaderLies(MakeContent(kLiar, ChooseIndices(kLiar.n, kLiar.k, 1), 1), &lies);
  AddCountAndRunLies(&lies);
  AddBitmapLies(&lies);
  AddEliasFanoLies(&lies);
  AddPlainBitmapLies(&lies);
  return lies;
}

}  // namespace hvd_sparse
