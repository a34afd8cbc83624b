#include "payload.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "checksum.h"
#include "elias_fano.h"
#include "low_bit.h"
#include "payload_sections.h"
#include "quantize.h"
#include "run_length.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little-endian, and this code copies the host's own byte order"
#endif

namespace hvd_sparse {
namespace {

int64_t ValuesSize(const PayloadFormat& format) {
  if (IsLowBit(format.dtype)) return LowBitSize(format.dtype, format.k, format.segments);
  return ItemSize(format.dtype) * format.k;
}

int64_t PadTo(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

uint32_t Checksum(const uint8_t* payload, int64_t size) {
  constexpr size_t kField = kChecksumAt;
  constexpr uint32_t kZero = 0;
  uint32_t crc = Crc32(payload, kField);
  crc = Crc32(&kZero, sizeof kZero, crc);
  return Crc32(payload + kField + sizeof kZero, static_cast<size_t>(size) - kField - sizeof kZero, crc);
}

void WriteValues(const PayloadFormat& format, const void* values, uint8_t* out) {
  if (format.dtype == DType::kNone) return;
  if (format.dtype == DType::kFloat32 || format.dtype == DType::kFloat64) {
    std::memcpy(out, values, static_cast<size_t>(ValuesSize(format)));
    return;
  }
  const auto* wide = static_cast<const float*>(values);
  for (int64_t j = 0; j < format.k; ++j) {
    const uint16_t bits = format.dtype == DType::kFloat16 ? ToFloat16(wide[j]).bits : ToBFloat16(wide[j]).bits;
    std::memcpy(out + 2 * j, &bits, sizeof bits);
  }
}

template <typename Number>
Status Expect(const char* what, Number expected, Number received) {
  if (expected == received) return Status::Ok();
  return Status::CorruptPayload(std::string("payload ") + what + " is " + std::to_string(received) + ", expected " +
                                std::to_string(expected));
}

Status CheckHeader(const PayloadFormat& format, const Header& header) {
  HVD_SPARSE_RETURN_IF_ERROR(Expect("magic", kMagic, header.magic));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("version", kVersion, header.version));
  HVD_SPARSE_RETURN_IF_ERROR(
      Expect("coding", static_cast<uint8_t>(ResolveCoding(format.coding, format.n, format.k)), header.coding));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("value dtype", static_cast<uint8_t>(format.dtype), header.dtype));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("reserved field", uint32_t{0}, header.zero | header.zero_too));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("element count n", static_cast<uint64_t>(format.n), header.n));
  if (header.entries == 0) return Status::Ok();
  return Expect("entries", static_cast<uint64_t>(format.k), header.entries);
}

}  // namespace

Status CheckBytes(const PayloadFormat& format, const uint8_t* payload, int64_t size, int64_t* entries) {
  int64_t expected;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &expected));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("size in bytes", expected, size));
  Header header;
  std::memcpy(&header, payload, sizeof header);
  HVD_SPARSE_RETURN_IF_ERROR(CheckHeader(format, header));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("checksum", Checksum(payload, size), header.checksum));
  *entries = static_cast<int64_t>(header.entries);
  return Status::Ok();
}

namespace {

// Copies `view.values` in the type that Unpack returns.
void CopyValues(const PayloadFormat& format, const PayloadView& view, void* values) {
  if (format.dtype == DType::kFloat64 || format.dtype == DType::kFloat32) {
    std::memcpy(values, view.values, static_cast<size_t>(view.entries * ItemSize(format.dtype)));
    return;
  }
  for (int64_t j = 0; j < view.entries; ++j) static_cast<float*>(values)[j] = ValueAt(view, format.dtype, j);
}

// The indices are read where values of several groups have few bits.
void ReadValues(const PayloadFormat& format, const uint8_t* payload, const int64_t* indices, PayloadView* view) {
  view->values = payload + ValuesAt(format);
  if (!IsLowBit(format.dtype)) return;
  view->low_bit.resize(static_cast<size_t>(view->entries));
  ReadLowBit(view->values, indices, view->entries, format.dtype, format.segments, view->low_bit.data());
}

// A damaged number of entries moves all payloads after it. Returns the error of the first located payload that is
// damaged itself, else `status`.
Status ErrorOfTheFirst(const std::vector<PayloadFormat>& members, const uint8_t* gathered, const int64_t* offsets,
                       const int64_t* ks, int64_t located, const Status& status) {
  const auto count = static_cast<int64_t>(members.size());
  for (int64_t p = 0; p < located; ++p) {
    PayloadFormat format = members[static_cast<size_t>(p % count)];
    format.k = ks[p];
    int64_t bytes = 0;
    int64_t entries = 0;
    Status own = PayloadSize(format, &bytes);
    if (own.ok()) own = CheckBytes(format, gathered + offsets[p], bytes, &entries);
    if (!own.ok()) return FromRank(p / count, own);
  }
  return status;
}

}  // namespace

Status FromRank(int64_t rank, Status status) {
  status.message = "from rank " + std::to_string(rank) + ": " + status.message;
  return status;
}

int64_t ValuesAt(const PayloadFormat& format) {
  const int64_t alignment = IsLowBit(format.dtype) ? 4 : std::max<int64_t>(1, ItemSize(format.dtype));
  return PadTo(kPositionsAt + PositionsSize(format.coding, format.n, format.k), alignment);
}

Header MakeHeader(const PayloadFormat& format, int64_t entries) {
  Header header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.coding = static_cast<uint8_t>(ResolveCoding(format.coding, format.n, format.k));
  header.dtype = static_cast<uint8_t>(format.dtype);
  header.n = static_cast<uint64_t>(format.n);
  header.entries = static_cast<uint64_t>(entries);
  return header;
}

void SealAround(const PayloadFormat& format, int64_t entries, int64_t size, uint32_t values_crc, uint8_t* payload) {
  static constexpr CrcPowers kPowers = MakeCrcPowers();
  Header header = MakeHeader(format, entries);
  std::memcpy(payload, &header, sizeof header);
  const int64_t at = ValuesAt(format);
  header.checksum = CrcShift(Checksum(payload, at), static_cast<uint64_t>(size - at), kPowers) ^ values_crc;
  std::memcpy(payload, &header, sizeof header);
}

Status PayloadSize(const PayloadFormat& format, int64_t* size) {
  if (format.n > kMaxElements) {
    return Status::InvalidArgument("n must be at most 2^48, got " + std::to_string(format.n));
  }
  if (format.k < 1 || format.k > format.n) {
    return Status::InvalidArgument("k must be in [1, n = " + std::to_string(format.n) + "], got " +
                                   std::to_string(format.k));
  }
  if (format.coding == Coding::kDense && format.k != format.n) {
    return Status::InvalidArgument("a dense payload holds all n = " + std::to_string(format.n) +
                                   " entries, got k = " + std::to_string(format.k));
  }
  if (IsLowBit(format.dtype)) HVD_SPARSE_RETURN_IF_ERROR(CheckSegments(format.segments, format.n));
  *size = PadTo(ValuesAt(format) + ValuesSize(format), 8);
  return Status::Ok();
}

Status Pack(const PayloadFormat& format, const int64_t* indices, const void* values, int64_t entries,
            uint8_t* payload) {
  int64_t size;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  if (entries != format.k && entries != 0) {
    return Status::InvalidArgument("a payload holds k = " + std::to_string(format.k) + " entries or none, got " +
                                   std::to_string(entries));
  }
  Positions positions;
  if (ResolveCoding(format.coding, format.n, format.k) == Coding::kRunLength) {
    positions.counts.resize(static_cast<size_t>(BlockCount(format.n)));
    positions.runs.resize(static_cast<size_t>(entries));
    HVD_SPARSE_RETURN_IF_ERROR(
        EncodeRunLength(indices, entries, format.n, positions.counts.data(), positions.runs.data()));
  } else {
    HVD_SPARSE_RETURN_IF_ERROR(CheckAscending(indices, entries, format.n));
  }
  std::vector<uint8_t> low_bit;
  if (IsLowBit(format.dtype) && entries > 0) {
    low_bit.resize(static_cast<size_t>(ValuesSize(format)));
    const auto* wide = static_cast<const float*>(values);
    HVD_SPARSE_RETURN_IF_ERROR(WriteLowBit(wide, indices, entries, format.dtype, format.segments, low_bit.data()));
  }

  std::memset(payload, 0, static_cast<size_t>(size));  // there is no error after this
  WritePositions(format.coding, indices, entries, format.n, format.k, positions, payload + kPositionsAt);
  if (!low_bit.empty()) {
    std::copy(low_bit.begin(), low_bit.end(), payload + ValuesAt(format));
  } else if (entries > 0) {
    WriteValues(format, values, payload + ValuesAt(format));
  }
  const int64_t at = ValuesAt(format);
  SealAround(format, entries, size, Crc32(payload + at, static_cast<size_t>(size - at)), payload);
  return Status::Ok();
}

Status Validate(const PayloadFormat& format, const uint8_t* payload, int64_t size, PayloadView* view) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckBytes(format, payload, size, &view->entries));
  HVD_SPARSE_RETURN_IF_ERROR(
      ReadPositions(format.coding, payload + kPositionsAt, format.n, format.k, view->entries, &view->positions));
  std::vector<int64_t> indices;
  if (IsLowBit(format.dtype) && !format.segments.empty()) {
    indices.resize(static_cast<size_t>(view->entries));
    DecodeRunLength(view->positions.counts.data(), view->positions.Runs(), format.n, indices.data());
  }
  ReadValues(format, payload, indices.data(), view);
  return Status::Ok();
}

Status ValidateIndices(const PayloadFormat& format, const uint8_t* payload, int64_t size, PayloadView* view,
                       std::vector<int64_t>* indices) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckBytes(format, payload, size, &view->entries));
  indices->resize(static_cast<size_t>(view->entries));
  HVD_SPARSE_RETURN_IF_ERROR(
      ReadIndices(format.coding, payload + kPositionsAt, format.n, format.k, view->entries, indices->data()));
  ReadValues(format, payload, indices->data(), view);
  return Status::Ok();
}

Status CheckRanks(int64_t ranks) {
  if (ranks >= 1 && ranks <= kMostRanks) return Status::Ok();
  return Status::InvalidArgument("ranks must be in [1, 2^23], got " + std::to_string(ranks));
}

Status LocatePayloads(std::vector<PayloadFormat> members, int64_t ranks, const uint8_t* gathered, int64_t size,
                      int64_t* offsets, int64_t* ks) {
  int64_t at = 0;
  int64_t located = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (PayloadFormat& format : members) {
      Header header{};
      if (size - at >= static_cast<int64_t>(sizeof header)) std::memcpy(&header, gathered + at, sizeof header);
      format.k = static_cast<int64_t>(std::max<uint64_t>(1, header.entries));
      int64_t bytes = 0;
      Status status =
          header.entries > static_cast<uint64_t>(format.n)
              ? Status::CorruptPayload("payload has " + std::to_string(header.entries) +
                                       " entries, but the tensor has n = " + std::to_string(format.n) + " elements")
              : PayloadSize(format, &bytes);
      if (status.ok() && bytes > size - at) {
        status = Status::CorruptPayload("payload needs " + std::to_string(bytes) + " bytes, only " +
                                        std::to_string(size - at) + " are left");
      }
      if (!status.ok()) return ErrorOfTheFirst(members, gathered, offsets, ks, located, FromRank(rank, status));
      offsets[located] = at;
      ks[located++] = format.k;
      at += bytes;
    }
  }
  if (at == size) return Status::Ok();
  return ErrorOfTheFirst(members, gathered, offsets, ks, located,
                         Status::CorruptPayload("the messages of all ranks have " + std::to_string(size) +
                                                " bytes, but their payloads end at " + std::to_string(at)));
}

float ValueAt(const PayloadView& view, DType dtype, int64_t j) {
  const uint8_t* at = view.values + j * ItemSize(dtype);
  switch (dtype) {
    case DType::kFloat64: {
      double value;
      std::memcpy(&value, at, sizeof value);
      return static_cast<float>(value);
    }
    case DType::kFloat16: {
      Float16 value;
      std::memcpy(&value, at, sizeof value);
      return ToFloat(value);
    }
    case DType::kBFloat16: {
      BFloat16 value;
      std::memcpy(&value, at, sizeof value);
      return ToFloat(value);
    }
    case DType::kInt2:
    case DType::kInt1: return view.low_bit[static_cast<size_t>(j)];
    case DType::kNone: return 0.0f;
    case DType::kFloat32: break;
  }
  float value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

void Unpack(const PayloadFormat& format, const PayloadView& view, int64_t* indices, void* values) {
  DecodeRunLength(view.positions.counts.data(), view.positions.Runs(), format.n, indices);
  CopyValues(format, view, values);
}

Status UnpackChecked(const PayloadFormat& format, const uint8_t* payload, int64_t size, int64_t* indices, void* values,
                     int64_t* entries) {
  PayloadView view;
  HVD_SPARSE_RETURN_IF_ERROR(CheckBytes(format, payload, size, &view.entries));
  HVD_SPARSE_RETURN_IF_ERROR(
      ReadIndices(format.coding, payload + kPositionsAt, format.n, format.k, view.entries, indices));
  ReadValues(format, payload, indices, &view);
  CopyValues(format, view, values);
  *entries = view.entries;
  return Status::Ok();
}

}  // namespace hvd_sparse
