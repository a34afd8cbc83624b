#include "payload.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "checksum.h"
#include "low_bit.h"
#include "quantize.h"
#include "run_length.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little-endian, and this code copies the host's own byte order"
#endif

namespace hvd_sparse {
namespace {

constexpr uint32_t kMagic = 0x53445648u;  // "HVDS"
constexpr uint8_t kVersion = 1;

struct Header {
  uint32_t magic;
  uint8_t version;
  uint8_t coding;
  uint8_t dtype;
  uint8_t zero;
  uint64_t n;
  uint64_t entries;
  uint32_t checksum;
  uint32_t zero_too;
};
static_assert(sizeof(Header) == 32 && offsetof(Header, checksum) == 24, "the header is part of the wire format");

struct Offsets {
  int64_t counts, full, runs, values, end;
};

int64_t ValuesSize(const PayloadFormat& format) {
  if (IsLowBit(format.dtype)) return LowBitSize(format.dtype, format.k, format.segments);
  return ItemSize(format.dtype) * format.k;
}

int64_t PadTo(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

Offsets Layout(const PayloadFormat& format) {
  const int64_t blocks = BlockCount(format.n);
  Offsets at{};
  at.counts = sizeof(Header);
  if (format.coding == Coding::kDense) {
    at.full = at.runs = at.values = at.counts;
  } else {
    at.full = at.counts + 2 * blocks;
    at.runs = PadTo(at.full + (format.k >= kBlock ? (blocks + 7) / 8 : 0), 2);
    const int64_t alignment = IsLowBit(format.dtype) ? 4 : std::max<int64_t>(1, ItemSize(format.dtype));
    at.values = PadTo(at.runs + 2 * format.k, alignment);
  }
  at.end = PadTo(at.values + ValuesSize(format), 8);
  return at;
}

uint32_t Checksum(const uint8_t* payload, int64_t size) {
  constexpr size_t kField = offsetof(Header, checksum);
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

void WritePositions(const PayloadFormat& format, const Offsets& at, const std::vector<uint32_t>& counts,
                    const std::vector<uint16_t>& runs, uint8_t* payload) {
  if (format.coding == Coding::kDense) return;
  for (size_t block = 0; block < counts.size(); ++block) {
    const auto count = static_cast<uint16_t>(counts[block]);
    std::memcpy(payload + at.counts + 2 * block, &count, sizeof count);
    if (counts[block] == kBlock && format.k >= kBlock) payload[at.full + block / 8] |= 1u << (block % 8);
  }
  if (!runs.empty()) std::memcpy(payload + at.runs, runs.data(), runs.size() * sizeof runs[0]);
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
  HVD_SPARSE_RETURN_IF_ERROR(Expect("coding", static_cast<uint8_t>(format.coding), header.coding));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("value dtype", static_cast<uint8_t>(format.dtype), header.dtype));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("reserved field", uint32_t{0}, header.zero | header.zero_too));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("element count n", static_cast<uint64_t>(format.n), header.n));
  if (header.entries == 0) return Status::Ok();
  return Expect("entries", static_cast<uint64_t>(format.k), header.entries);
}

// Counts and runs; of a dense payload, what run lengths would say.
void ReadPositions(const PayloadFormat& format, const Offsets& at, const uint8_t* payload, PayloadView* view) {
  view->counts.assign(static_cast<size_t>(BlockCount(format.n)), 0u);
  view->runs.assign(static_cast<size_t>(view->entries), uint16_t{0});
  const bool dense = format.coding == Coding::kDense;
  for (size_t block = 0; block < view->counts.size() && !(dense && view->entries == 0); ++block) {
    uint16_t count = 0;
    if (!dense) std::memcpy(&count, payload + at.counts + 2 * block, sizeof count);
    view->counts[block] = dense ? static_cast<uint32_t>(BlockLength(format.n, static_cast<int64_t>(block))) : count;
    if (!dense && format.k >= kBlock && (payload[at.full + block / 8] >> (block % 8) & 1) != 0) {
      view->counts[block] += kBlock;
    }
  }
  if (!dense && view->entries > 0) {
    std::memcpy(view->runs.data(), payload + at.runs, view->runs.size() * sizeof(uint16_t));
  }
}

void ReadValues(const PayloadFormat& format, const Offsets& at, const uint8_t* payload, PayloadView* view) {
  view->values = payload + at.values;
  if (!IsLowBit(format.dtype)) return;
  std::vector<int64_t> indices(static_cast<size_t>(view->entries));
  DecodeRunLength(view->counts.data(), view->runs.data(), format.n, indices.data());
  view->low_bit.resize(indices.size());
  ReadLowBit(view->values, indices.data(), view->entries, format.dtype, format.segments, view->low_bit.data());
}

}  // namespace

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
  *size = Layout(format).end;
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
  std::vector<uint32_t> counts(static_cast<size_t>(BlockCount(format.n)));
  std::vector<uint16_t> runs(static_cast<size_t>(entries));
  HVD_SPARSE_RETURN_IF_ERROR(EncodeRunLength(indices, entries, format.n, counts.data(), runs.data()));
  std::vector<uint8_t> low_bit;
  if (IsLowBit(format.dtype) && entries > 0) {
    low_bit.resize(static_cast<size_t>(ValuesSize(format)));
    const auto* wide = static_cast<const float*>(values);
    HVD_SPARSE_RETURN_IF_ERROR(WriteLowBit(wide, indices, entries, format.dtype, format.segments, low_bit.data()));
  }

  const Offsets at = Layout(format);
  std::memset(payload, 0, static_cast<size_t>(size));  // from here on nothing is refused
  WritePositions(format, at, counts, runs, payload);
  if (!low_bit.empty()) {
    std::copy(low_bit.begin(), low_bit.end(), payload + at.values);
  } else if (entries > 0) {
    WriteValues(format, values, payload + at.values);
  }
  Header header{kMagic,
                kVersion,
                static_cast<uint8_t>(format.coding),
                static_cast<uint8_t>(format.dtype),
                0,
                static_cast<uint64_t>(format.n),
                static_cast<uint64_t>(entries),
                0,
                0};
  std::memcpy(payload, &header, sizeof header);
  header.checksum = Checksum(payload, size);
  std::memcpy(payload, &header, sizeof header);
  return Status::Ok();
}

Status Validate(const PayloadFormat& format, const uint8_t* payload, int64_t size, PayloadView* view) {
  int64_t expected;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &expected));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("size in bytes", expected, size));
  Header header;
  std::memcpy(&header, payload, sizeof header);
  HVD_SPARSE_RETURN_IF_ERROR(CheckHeader(format, header));
  HVD_SPARSE_RETURN_IF_ERROR(Expect("checksum", Checksum(payload, size), header.checksum));
  const Offsets at = Layout(format);
  view->entries = static_cast<int64_t>(header.entries);
  ReadPositions(format, at, payload, view);
  HVD_SPARSE_RETURN_IF_ERROR(ValidateRunLength(view->counts.data(), view->runs.data(), view->entries, format.n));
  ReadValues(format, at, payload, view);
  return Status::Ok();
}

Status LocatePayloads(std::vector<PayloadFormat> members, int64_t ranks, const uint8_t* gathered, int64_t size,
                      int64_t* offsets, int64_t* ks) {
  int64_t at = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (PayloadFormat& format : members) {
      Header header{};
      if (size - at >= static_cast<int64_t>(sizeof header)) std::memcpy(&header, gathered + at, sizeof header);
      format.k = static_cast<int64_t>(std::max<uint64_t>(1, header.entries));
      int64_t bytes = 0;
      Status status = header.entries > static_cast<uint64_t>(format.n)
                          ? Status::CorruptPayload("payload entries exceed n")
                          : PayloadSize(format, &bytes);
      if (status.ok() && bytes > size - at) status = Status::CorruptPayload("payload is cut off");
      if (!status.ok()) {
        status.message = "from rank " + std::to_string(rank) + ": " + status.message;
        return status;
      }
      *offsets++ = at;
      *ks++ = format.k;
      at += bytes;
    }
  }
  return Expect("messages' size in bytes", at, size);
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
  DecodeRunLength(view.counts.data(), view.runs.data(), format.n, indices);
  if (format.dtype == DType::kFloat64) {
    std::memcpy(values, view.values, static_cast<size_t>(view.entries) * sizeof(double));
    return;
  }
  for (int64_t j = 0; j < view.entries; ++j) static_cast<float*>(values)[j] = ValueAt(view, format.dtype, j);
}

}  // namespace hvd_sparse
