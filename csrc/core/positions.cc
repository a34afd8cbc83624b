#include "positions.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "elias_fano.h"
#include "payload_sections.h"
#include "run_length.h"

namespace hvd_sparse {
namespace {

void WriteRunLengths(const Positions& positions, int64_t n, int64_t k, uint8_t* section) {
  for (size_t block = 0; block < positions.counts.size(); ++block) {
    const auto count = static_cast<uint16_t>(positions.counts[block]);
    std::memcpy(section + 2 * block, &count, sizeof count);
    if (positions.counts[block] == kBlock && k >= kBlock) {
      section[static_cast<size_t>(FullAt(n)) + block / 8] |= static_cast<uint8_t>(1u << (block % 8));
    }
  }
  if (!positions.runs.empty()) {
    std::memcpy(section + RunsAt(n, k), positions.runs.data(), positions.runs.size() * sizeof(uint16_t));
  }
}

Status ReadRunLengths(const uint8_t* section, int64_t n, int64_t k, int64_t entries, Positions* positions) {
  positions->counts.resize(static_cast<size_t>(BlockCount(n)));
  for (size_t block = 0; block < positions->counts.size(); ++block) {
    uint16_t count;
    std::memcpy(&count, section + 2 * block, sizeof count);
    positions->counts[block] = count;
    if (k >= kBlock && (section[static_cast<size_t>(FullAt(n)) + block / 8] >> (block % 8) & 1) != 0) {
      positions->counts[block] += kBlock;
    }
  }
  positions->runs.clear();
  positions->in_place = section + RunsAt(n, k);
  return ValidateRunLength(positions->counts.data(), positions->in_place, entries, n);
}

// Of any coding but run lengths: indices in [0, n) or beyond, in any order.
Status DecodeIndices(Coding coding, const uint8_t* section, int64_t n, int64_t k, int64_t entries, int64_t* indices) {
  if (entries == 0 && std::any_of(section, section + PositionsSize(coding, n, k), [](uint8_t b) { return b != 0; })) {
    return Status::CorruptPayload("there are positions, but no entries");
  }
  if (coding == Coding::kDense) {
    for (int64_t j = 0; j < entries; ++j) indices[j] = j;
  } else if (entries > 0) {
    return coding == Coding::kBitmap ? DecodeBitmap(section, k, n, indices) : DecodeEliasFano(section, k, n, indices);
  }
  return Status::Ok();
}

Status AsCorrupt(Status status) {
  if (!status.ok()) status.kind = StatusKind::kCorruptPayload;
  return status;
}

}  // namespace

int64_t FullAt(int64_t n) { return 2 * BlockCount(n); }

int64_t RunsAt(int64_t n, int64_t k) {
  const int64_t end = FullAt(n) + (k >= kBlock ? (BlockCount(n) + 7) / 8 : 0);
  return end + end % 2;
}

Coding ResolveCoding(Coding coding, int64_t n, int64_t k) {
  if (coding != Coding::kAuto) return coding;
  if (k == n) return Coding::kDense;
  return EliasFanoSize(n, k) < BitmapSize(n) ? Coding::kEliasFano : Coding::kBitmap;  // run lengths are never smaller
}

int64_t PositionsSize(Coding coding, int64_t n, int64_t k) {
  switch (ResolveCoding(coding, n, k)) {
    case Coding::kDense: return 0;
    case Coding::kEliasFano: return EliasFanoSize(n, k);
    case Coding::kBitmap: return BitmapSize(n);
    default: return RunsAt(n, k) + 2 * k;
  }
}

void WritePositions(Coding coding, const int64_t* indices, int64_t entries, int64_t n, int64_t k,
                    const Positions& positions, uint8_t* section) {
  switch (ResolveCoding(coding, n, k)) {
    case Coding::kDense: break;
    case Coding::kEliasFano:
      if (entries > 0) EncodeEliasFano(indices, k, n, section);
      break;
    case Coding::kBitmap: EncodeBitmap(indices, entries, section); break;
    default: WriteRunLengths(positions, n, k, section); break;
  }
}

Status ReadPositions(Coding coding, const uint8_t* section, int64_t n, int64_t k, int64_t entries,
                     Positions* positions) {
  coding = ResolveCoding(coding, n, k);
  if (coding == Coding::kRunLength) return ReadRunLengths(section, n, k, entries, positions);
  positions->in_place = nullptr;
  std::vector<int64_t> indices(static_cast<size_t>(entries));
  HVD_SPARSE_RETURN_IF_ERROR(DecodeIndices(coding, section, n, k, entries, indices.data()));
  positions->counts.resize(static_cast<size_t>(BlockCount(n)));
  positions->runs.resize(indices.size());
  return AsCorrupt(EncodeRunLength(indices.data(), entries, n, positions->counts.data(), positions->runs.data()));
}

Status ReadIndices(Coding coding, const uint8_t* section, int64_t n, int64_t k, int64_t entries, int64_t* indices) {
  coding = ResolveCoding(coding, n, k);
  if (coding == Coding::kRunLength) {
    Positions positions;
    HVD_SPARSE_RETURN_IF_ERROR(ReadRunLengths(section, n, k, entries, &positions));
    DecodeRunLength(positions.counts.data(), positions.Runs(), n, indices);
    return Status::Ok();
  }
  HVD_SPARSE_RETURN_IF_ERROR(DecodeIndices(coding, section, n, k, entries, indices));
  return AsCorrupt(CheckAscending(indices, entries, n));
}

}  // namespace hvd_sparse
