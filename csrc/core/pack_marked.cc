#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "checksum.h"
#include "elias_fano.h"
#include "layout.h"
#include "marks.h"
#include "run_length.h"

// Whether there are vectors that can be compressed is asked when it is wanted, as in checksum.cc.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(HVD_SPARSE_PORTABLE)
#define HVD_SPARSE_COMPRESSES
#include <immintrin.h>
#endif

namespace hvd_sparse {
namespace {

constexpr int64_t kRare = 16;  // elements per mark from which on these are looked up one by one

#ifdef HVD_SPARSE_COMPRESSES

constexpr int64_t kLanes = 16;
constexpr int64_t kAhead = 1024;  // values to fetch ahead

// Writes the marked ones of values[begin, end), one after the other, in whole words and as long as as many values as a
// word can mark fit before `out_end`. Returns where they end, and where in the values.
__attribute__((target("avx512f"))) uint8_t* CompressWords(const float* values, const uint64_t* marks, int64_t end,
                                                          const uint8_t* out_end, int64_t* begin, uint8_t* out) {
  for (; *begin + kMarkBits <= end && out_end - out >= kMarkBits * int64_t{sizeof(float)}; *begin += kMarkBits) {
    const uint64_t bits = marks[*begin / kMarkBits];
    for (int64_t lane = 0; lane < kMarkBits; lane += kLanes) {
      __builtin_prefetch(values + *begin + lane + kAhead);  // the hardware's own prefetcher ends at every page
      const auto mask = static_cast<__mmask16>(bits >> lane);
      const __m512 compressed = _mm512_maskz_compress_ps(mask, _mm512_loadu_ps(values + *begin + lane));
      _mm512_storeu_ps(out, compressed);  // what lies behind the marked ones is overwritten by the next
      out += __builtin_popcount(mask) * int64_t{sizeof(float)};
    }
  }
  return out;
}

#endif

// Writes marked values block by block, and their positions if these are coded as Elias and Fano do.
class BlockWriter {
 public:
  BlockWriter(const PayloadFormat& format, const float* values, const uint64_t* marks, uint8_t* payload)
      : values_(values),
        marks_(marks),
        is_elias_fano_(ResolveCoding(format.coding, format.n, format.k) == Coding::kEliasFano),
        is_dense_(Compresses() && format.k * kRare > format.n),
        positions_(format.n, format.k, payload + kPositionsAt) {}

  // Writes at `out` what is marked in [begin, end); returns where it ends.
  uint8_t* Write(int64_t begin, int64_t end, const uint8_t* out_end, uint8_t* out) {
    EliasFanoWriter positions = positions_;  // a local one is not written to memory with every byte
    int64_t rest = begin;
#ifdef HVD_SPARSE_COMPRESSES
    if (is_dense_) out = CompressWords(values_, marks_, end, out_end, &rest, out);
#else
    static_cast<void>(out_end);
#endif
    if (is_elias_fano_) ForEachMarked(marks_, begin, rest, [&](int64_t i) { positions.Put(i); });
    const auto fetch = [&](int64_t i) { __builtin_prefetch(values_ + i); };
    ForEachMarkedAhead(marks_, rest, end, fetch, [&](int64_t i) {
      if (is_elias_fano_) positions.Put(i);
      std::memcpy(out, values_ + i, sizeof(float));
      out += sizeof(float);
    });
    positions_ = positions;
    return out;
  }

  void Finish() {
    if (is_elias_fano_) positions_.Finish();
  }

 private:
  static bool Compresses() {
#ifdef HVD_SPARSE_COMPRESSES
    static const bool kCompresses = __builtin_cpu_supports("avx512f") != 0;
    return kCompresses;
#else
    return false;
#endif
  }

  const float* values_;
  const uint64_t* marks_;
  bool is_elias_fano_;
  bool is_dense_;
  EliasFanoWriter positions_;
};

Status PackAsRunLengths(const PayloadFormat& format, const float* values, const uint64_t* marks, uint8_t* payload) {
  std::vector<int64_t> indices;
  std::vector<float> gathered;
  ForEachMarked(marks, 0, format.n, [&](int64_t i) {
    indices.push_back(i);
    gathered.push_back(values[i]);
  });
  return Pack(format, indices.data(), gathered.data(), format.k, payload);
}

}  // namespace

Status PackMarked(const PayloadFormat& format, const float* values, const uint64_t* marks, uint8_t* payload) {
  int64_t size;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  if (format.dtype != DType::kFloat32) return Status::InvalidArgument("marked values are packed as float32");
  const int64_t marked = CountMarks(marks, MarkWords(format.n));
  if (marked != format.k) {
    return Status::InvalidArgument("k must be the number of marks, " + std::to_string(marked) + ", got " +
                                   std::to_string(format.k));
  }
  const Coding coding = ResolveCoding(format.coding, format.n, format.k);
  if (coding == Coding::kRunLength) return PackAsRunLengths(format, values, marks, payload);
  std::memset(payload, 0, static_cast<size_t>(ValuesAt(format)));
  if (coding == Coding::kBitmap) {
    std::memcpy(payload + kPositionsAt, marks, static_cast<size_t>(BitmapSize(format.n)));
  }
  BlockWriter writer(format, values, marks, payload);
  uint8_t* out = payload + ValuesAt(format);
  uint32_t crc = 0;  // of the values, summed while a cache has them
  for (int64_t begin = 0; begin < format.n; begin += kBlock) {
    const uint8_t* first = out;
    out = writer.Write(begin, std::min(begin + kBlock, format.n), payload + size, out);
    crc = Crc32(first, static_cast<size_t>(out - first), crc);
  }
  writer.Finish();
  const auto padding = static_cast<size_t>(payload + size - out);
  std::memset(out, 0, padding);
  SealAround(format, format.k, size, Crc32(out, padding, crc), payload);
  return Status::Ok();
}

uint32_t SealedCrc(const uint8_t* payload, int64_t size) {
  static constexpr CrcPowers kPowers = MakeCrcPowers();
  uint32_t checksum;
  std::memcpy(&checksum, payload + kChecksumAt, sizeof checksum);
  uint32_t remainder = checksum;  // of its four bytes, which are zero where the checksum is taken
  for (int bit = 0; bit < 32; ++bit) remainder = (remainder >> 1) ^ ((remainder & 1u) != 0 ? kCrcPolynomial : 0u);
  return checksum ^ CrcShift(remainder, static_cast<uint64_t>(size - kChecksumAt) - sizeof checksum, kPowers);
}

}  // namespace hvd_sparse
