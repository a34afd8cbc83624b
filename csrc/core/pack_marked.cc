#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "checksum.h"
#include "elias_fano.h"
#include "marks.h"
#include "payload_sections.h"
#include "run_length.h"

namespace hvd_sparse {
namespace {

Status PackAsRunLengths(const PayloadFormat& format, const float* values, const uint64_t* marks, uint8_t* payload) {
  std::vector<int64_t> indices;
  std::vector<float> gathered;
  ForEachMarked(marks, 0, format.n, [&](int64_t i) {
    indices.push_back(i);
    gathered.push_back(values[i]);
  });
  return Pack(format, indices.data(), gathered.data(), static_cast<int64_t>(indices.size()), payload);
}

}  // namespace

Status PackMarked(const PayloadFormat& format, const float* values, const uint64_t* marks, uint8_t* payload) {
  int64_t size;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  if (format.dtype != DType::kFloat32) return Status::InvalidArgument("marked values are packed as float32");
  const int64_t rest = format.n % kMarkBits;
  if (rest != 0 && marks[format.n / kMarkBits] >> rest != 0) {
    return Status::InvalidArgument("elements from n = " + std::to_string(format.n) +
                                   " on are marked: clear their bits");
  }
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
  const bool is_elias_fano = coding == Coding::kEliasFano;
  EliasFanoWriter positions(format.n, format.k, payload + kPositionsAt);
  uint8_t* out = payload + ValuesAt(format);
  uint32_t crc = 0;  // of the values, updated block by block while they are in the cache
  const auto fetch = [&](int64_t i) { __builtin_prefetch(values + i); };
  for (int64_t begin = 0; begin < format.n; begin += kBlock) {
    const uint8_t* first = out;
    ForEachMarkedAhead(marks, begin, std::min(begin + kBlock, format.n), fetch, [&](int64_t i) {
      if (is_elias_fano) positions.Put(i);
      std::memcpy(out, values + i, sizeof(float));
      out += sizeof(float);
    });
    crc = Crc32(first, static_cast<size_t>(out - first), crc);
  }
  if (is_elias_fano) positions.Finish();
  const auto padding = static_cast<size_t>(payload + size - out);
  std::memset(out, 0, padding);
  SealAround(format, format.k, size, Crc32(out, padding, crc), payload);
  return Status::Ok();
}

uint32_t SealedCrc(const uint8_t* payload, int64_t size) {
  static constexpr CrcPowers kPowers = MakeCrcPowers();
  uint32_t checksum;
  std::memcpy(&checksum, payload + kChecksumAt, sizeof checksum);
  // The checksum was computed with zeros in its field: what the field adds is its bits, shifted to the end.
  return checksum ^ CrcShift(checksum, static_cast<uint64_t>(size - kChecksumAt), kPowers);
}

}  // namespace hvd_sparse
