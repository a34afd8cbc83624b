// The decoder reads arbitrary bytes without a fault, and accepts only payloads. This is a libFuzzer target; with
// fuzz_main.cc it is also a test.
//
// An input is a format followed by the bytes. Format: flags u8; coding u8; dtype u8; number of segments u8, modulo 4;
// n - 1 u24; k u24; ranks u8; for each segment u16 begin and u16 channels. make_corpus.py writes this layout.
#include "fuzz_payload.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "checksum.h"
#include "cuts.h"
#include "mask.h"
#include "payloads.h"
#include "reduce.h"

namespace hvd_sparse {
namespace {

// Mutations almost never produce a correct checksum, and rarely a length and a header that fit the mutated format.
constexpr unsigned kFitted = 1;  // the bytes are cut, or zeros added, to the payload's size; the checksum is put right
constexpr unsigned kTitled = 2;  // with that, the header is that of the format; entries are k, or none if it says so
constexpr int64_t kMostElements = int64_t{1} << 18;  // of a large input: four blocks
constexpr int64_t kFewElements = int64_t{1} << 10;   // of any other
constexpr size_t kOracleBytes = 2048;                // beyond, wire.h, which goes bit by bit, takes too long

void Require(bool condition, const PayloadFormat& format, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s: coding %d, dtype %s, n = %lld, k = %lld, %zu segments\n", what,
               static_cast<int>(format.coding), Name(format.dtype), static_cast<long long>(format.n),
               static_cast<long long>(format.k), format.segments.size());
  std::abort();
}

// Numbers from the front of the input; zero behind its end.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  int64_t Take(int width) {
    int64_t number = 0;
    for (int i = 0; i < width && at_ < size_; ++i) number |= int64_t{data_[at_++]} << (8 * i);
    return number;
  }
  Bytes Rest() const { return Bytes(data_ + at_, data_ + size_); }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

struct Input {
  unsigned flags = 0;
  PayloadFormat format;
  int64_t ranks = 1;
  Bytes bytes;
};

Input ReadInput(const uint8_t* data, size_t size) {
  constexpr Coding kAny[] = {Coding::kRunLength, Coding::kDense, Coding::kEliasFano, Coding::kBitmap, Coding::kAuto};
  Reader reader(data, size);
  Input input;
  input.flags = static_cast<unsigned>(reader.Take(1));
  input.format.coding = kAny[reader.Take(1) % 5];
  input.format.dtype = static_cast<DType>(reader.Take(1) % 7);
  const int64_t segments = reader.Take(1) % 4;
  input.format.n = 1 + reader.Take(3) % (IsLarge(data, size) ? kMostElements : kFewElements);
  input.format.k = reader.Take(3);
  input.ranks = 1 + reader.Take(1) % 3;
  for (int64_t i = 0; i < segments; ++i) {
    const int64_t begin = reader.Take(2);
    input.format.segments.push_back({begin, reader.Take(2)});
  }
  input.bytes = reader.Rest();
  return input;
}

void SealFast(Bytes* bytes) {  // wire.h's Seal is bit by bit
  WriteNumber(bytes, kCrcAt, 0, 4);
  WriteNumber(bytes, kCrcAt, Crc32(bytes->data(), bytes->size()), 4);
}

void Fit(const Input& input, int64_t size, Bytes* bytes) {
  bytes->resize(static_cast<size_t>(size));
  if ((input.flags & kTitled) != 0) {
    const bool empty = ReadNumber(*bytes, kEntriesAt, 8) == 0;
    const Bytes start = StartOf(input.format);
    std::copy(start.begin(), start.end(), bytes->begin());
    WriteNumber(bytes, kElementsAt, static_cast<uint64_t>(input.format.n), 8);
    WriteNumber(bytes, kEntriesAt, empty ? 0 : static_cast<uint64_t>(input.format.k), 8);
    WriteNumber(bytes, kZeroTooAt, 0, 4);
  }
  SealFast(bytes);
}

// The content of a payload, in heap arrays of exact size.
struct Entries {
  Entries(const PayloadFormat& format, const PayloadView& view)
      : count(static_cast<size_t>(view.entries)),
        width(format.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float)),
        indices(new int64_t[count]),
        values(new uint8_t[count * width]) {
    Unpack(format, view, indices.get(), values.get());
  }
  double At(size_t j) const {
    double wide = 0;
    float narrow = 0;
    std::memcpy(width == sizeof wide ? static_cast<void*>(&wide) : &narrow, &values[j * width], width);
    return width == sizeof wide ? wide : static_cast<double>(narrow);
  }

  size_t count, width;
  std::unique_ptr<int64_t[]> indices;
  std::unique_ptr<uint8_t[]> values;
};

// Compares with the second decoder, in wire.h.
void CheckAgainstOracle(const PayloadFormat& format, const Bytes& bytes, const Entries* entries) {
  std::vector<int64_t> indices;
  std::vector<uint64_t> values;
  const bool good = ParsePayload(format, bytes, &indices, &values);
  Require(good == (entries != nullptr), format, good ? "refused a payload" : "accepted what is no payload");
  if (!good) return;
  Require(indices.size() == entries->count && std::equal(indices.begin(), indices.end(), entries->indices.get()),
          format, "unpacked other indices than there are");
  for (size_t j = 0; j < indices.size() && format.dtype != DType::kNone; ++j) {
    Require(SameNumber(Decode(format.dtype, values[j]), entries->At(j)), format, "unpacked another value");
  }
}

// Reads a matrix from the same bytes into heap arrays of exact size: it has these entries, or is refused, too.
void CheckRows(const PayloadFormat& format, const Exact& copy, int64_t size, const Entries* entries) {
  if (ItemSize(format.dtype) == 0) return;
  const auto n = static_cast<size_t>(format.n), width = static_cast<size_t>(ItemSize(format.dtype));
  const std::unique_ptr<uint8_t[]> values(new uint8_t[n * width]), mask(new uint8_t[n]);
  const Status status = UnpackMasked(format, copy.get(), size, values.get(), mask.get());
  Require(status.ok() == (entries != nullptr), format, "reads a matrix where there is none, or none where there is");
  if (entries == nullptr) return;
  for (size_t j = 0; j < entries->count; ++j) {
    const auto index = static_cast<size_t>(entries->indices[j]);
    uint64_t bits = 0;
    std::memcpy(&bits, &values[index * width], width);
    Require(mask[index] == 1 && SameNumber(Decode(format.dtype, bits), entries->At(j)), format, "reads another matrix");
  }
  const auto kept = static_cast<size_t>(std::count(mask.get(), mask.get() + n, uint8_t{1}));
  const auto zeros = static_cast<size_t>(std::count(mask.get(), mask.get() + n, uint8_t{0}));
  Require(kept == entries->count && kept + zeros == n, format, "masks what is not there");
}

// Clears everything that a decoder must ignore: padding, and an empty contribution after its header.
Bytes WithoutPadding(const PayloadFormat& format, Bytes bytes, size_t entries) {
  const Parts parts = PartsOf(format);
  const auto n = static_cast<size_t>(format.n), k = static_cast<size_t>(format.k);
  const auto clear = [&](size_t begin, size_t end) {
    std::fill(bytes.begin() + static_cast<long>(begin), bytes.begin() + static_cast<long>(end), uint8_t{0});
  };
  const Coding coding = CodingOf(format);
  if (entries == 0) clear(kCountsAt, parts.end);
  const size_t blocks = (parts.bitmap - kCountsAt) / 2;
  if (coding == Coding::kRunLength && k >= 65536) {
    if (blocks % 8 != 0) bytes[parts.bitmap + blocks / 8] &= static_cast<uint8_t>((1u << blocks % 8) - 1);
    clear(parts.bitmap + (blocks + 7) / 8, parts.runs);
  }
  if (coding == Coding::kEliasFano && k * LowBitsOf(n, k) % 8 != 0) {
    bytes[kCountsAt + LowerSize(n, k) - 1] &= static_cast<uint8_t>((1u << k * LowBitsOf(n, k) % 8) - 1);
  }
  clear(kCountsAt + PlacesSize(coding, n, k), parts.values);
  clear(parts.values + static_cast<size_t>(ItemSize(format.dtype)) * k, parts.end);
  SealFast(&bytes);
  return bytes;
}

// Packing the unpacked entries gives the same bytes, if the encoding is unique. It is not unique for NaN in 16 bits,
// and for low bits with unused levels. In these cases the bytes do not change when unpacked and packed again.
void CheckRepacked(const PayloadFormat& format, const Bytes& bytes, const Entries& entries) {
  Bytes again(bytes.size(), 0xff);
  const auto count = static_cast<int64_t>(entries.count);
  const Status status = Pack(format, entries.indices.get(), entries.values.get(), count, again.data());
  Require(status.ok(), format, "does not pack what it unpacked");
  bool one_way = CodeBitsOf(format.dtype) == 0;
  for (size_t j = 0; j < entries.count && ItemSize(format.dtype) == 2; ++j) one_way &= !std::isnan(entries.At(j));
  if (one_way || entries.count == 0) {
    Require(again == WithoutPadding(format, bytes, entries.count), format, "packed other bytes than it unpacked");
    return;
  }
  PayloadView view;
  Require(Validate(format, again.data(), static_cast<int64_t>(again.size()), &view).ok(), format,
          "refuses what it packed");
  const Entries twice(format, view);
  Require(twice.count == entries.count &&
              std::equal(entries.indices.get(), entries.indices.get() + count, twice.indices.get()),
          format, "packed other indices");
  for (size_t j = 0; j < entries.count; ++j)
    Require(SameNumber(entries.At(j), twice.At(j)), format, "packed another value");
  Bytes third(bytes.size());
  Require(Pack(format, twice.indices.get(), twice.values.get(), count, third.data()).ok() && third == again, format,
          "packing does not settle");
}

// Checks the sum over `ranks` ranks that all sent these entries.
void CheckSum(const Input& input, const std::vector<Source>& sources, const PayloadView& view, const Entries& entries) {
  const PayloadFormat& format = input.format;
  const std::unique_ptr<float[]> out(new float[static_cast<size_t>(format.n)]);
  std::fill_n(out.get(), format.n, 7.0f);
  Require(ReduceSources(format, sources, 0.5f, ShuffledFor, {{0, format.n, out.get()}}).ok(), format,
          "adds no payload that it accepted");
  int64_t next = 0;
  for (size_t j = 0; j < entries.count; next = entries.indices[j++] + 1) {
    const int64_t index = entries.indices[j];
    Require(index >= next && index < format.n, format, "indices do not ascend below n");
    Require(std::all_of(out.get() + next, out.get() + index, [](float value) { return value == 0; }), format,
            "added where nothing is");
    float sum = 0;
    for (int64_t rank = 0; rank < input.ranks; ++rank)
      sum += 0.5f * ValueAt(view, format.dtype, static_cast<int64_t>(j));
    Require(SameNumber(static_cast<double>(sum), static_cast<double>(out[static_cast<size_t>(index)])), format,
            "added something else");
  }
  Require(std::all_of(out.get() + next, out.get() + format.n, [](float value) { return value == 0; }), format,
          "added behind the last");
}

// Locates payloads in arbitrary bytes. The located payloads are consecutive, and can be added or are refused.
bool CheckLocated(const Input& input, const Bytes& bytes) {
  const PayloadFormat& format = input.format;
  const Exact copy(bytes);
  std::vector<int64_t> offsets(static_cast<size_t>(input.ranks), -1), ks(offsets);
  const auto size = static_cast<int64_t>(bytes.size());
  const Status status = LocatePayloads({format}, input.ranks, copy.get(), size, offsets.data(), ks.data());
  Require(status.ok() == status.message.empty(), format, "an error says nothing");
  const std::unique_ptr<float[]> at_once(new float[static_cast<size_t>(format.n)]);
  at_once[0] = 7;
  const Status whole = ReduceLocated({format}, input.ranks, copy.get(), size, 1, ShuffledFor, {at_once.get()});
  if (!status.ok()) {
    Require(whole.kind == status.kind && at_once[0] == 7, format, "adds what it does not locate");
    return false;
  }
  int64_t at = 0;
  std::vector<Source> sources;
  for (size_t rank = 0; rank < offsets.size(); ++rank) {
    PayloadFormat found = format;
    found.k = ks[rank];
    int64_t length = 0;
    Require(offsets[rank] == at && PayloadSize(found, &length).ok(), found, "located no payload, or not the next");
    at += length;
    sources.push_back({copy.get() + offsets[rank], found.k, length});
  }
  Require(at == size, format, "located other bytes than there are");
  const std::unique_ptr<float[]> out(new float[static_cast<size_t>(format.n)]);
  out[0] = 7;
  const Status reduced = ReduceSources(format, sources, 1, SerialFor, {{0, format.n, out.get()}});
  Require(reduced.ok() || (reduced.kind == StatusKind::kCorruptPayload && out[0] == 7), format,
          "wrote before it refused");
  const auto sum_bytes = static_cast<size_t>(format.n) * sizeof(float);
  Require(whole.kind == reduced.kind && (!whole.ok() || std::memcmp(out.get(), at_once.get(), sum_bytes) == 0), format,
          "adds something else at once");
  ++TheFuzzCounts().messages_located;
  return true;
}

void CheckAccepted(const Input& input, const Bytes& bytes, const Exact& copy, const PayloadView& view) {
  const PayloadFormat& format = input.format;
  Require(view.entries == 0 || view.entries == format.k, format, "a number of entries that is neither k nor none");
  const Entries entries(format, view);
  if (bytes.size() <= kOracleBytes) CheckAgainstOracle(format, bytes, &entries);
  CheckRepacked(format, bytes, entries);
  const auto size = static_cast<int64_t>(bytes.size());
  CheckRows(format, copy, size, &entries);
  CheckSum(input, std::vector<Source>(static_cast<size_t>(input.ranks), {copy.get(), format.k, size}), view, entries);
  Bytes message;
  for (int64_t rank = 0; rank < input.ranks; ++rank) message.insert(message.end(), bytes.begin(), bytes.end());
  const bool located = CheckLocated(input, message);
  Require(located || view.entries == 0, format, "does not locate what it accepted");  // none: as one of k = 1
}

// UnpackChecked must say what Validate says, and write what Unpack writes.
void CheckUnpackedAtOnce(const PayloadFormat& format, const Exact& copy, int64_t size, const Status& status,
                         const Entries* entries) {
  const auto room = static_cast<size_t>(format.k);
  const std::unique_ptr<int64_t[]> indices(new int64_t[room]);
  const std::unique_ptr<double[]> values(new double[room]);  // float64 is the widest
  int64_t count = 0;
  const Status other = UnpackChecked(format, copy.get(), size, indices.get(), values.get(), &count);
  Require(other.kind == status.kind && other.message == status.message, format, "unpacks at once what is refused");
  if (entries == nullptr) return;
  Require(static_cast<size_t>(count) == entries->count &&
              std::equal(entries->indices.get(), entries->indices.get() + count, indices.get()),
          format, "unpacks other indices at once");
  const size_t bytes = entries->count * (format.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float));
  Require(std::memcmp(entries->values.get(), values.get(), bytes) == 0, format, "unpacks other values at once");
}

void CheckPayload(const Input& input, int64_t size) {
  Bytes bytes = input.bytes;
  if ((input.flags & kFitted) != 0) Fit(input, size, &bytes);
  const Exact copy(bytes);
  PayloadView view;
  const Status status = Validate(input.format, copy.get(), static_cast<int64_t>(bytes.size()), &view);
  if (status.ok()) {
    ++TheFuzzCounts().accepted;
    CheckAccepted(input, bytes, copy, view);
    const Entries entries(input.format, view);
    CheckUnpackedAtOnce(input.format, copy, static_cast<int64_t>(bytes.size()), status, &entries);
    return;
  }
  ++TheFuzzCounts().refused;
  Require(status.kind == StatusKind::kCorruptPayload && !status.message.empty(), input.format,
          "refused in another way");
  CheckUnpackedAtOnce(input.format, copy, static_cast<int64_t>(bytes.size()), status, nullptr);
  CheckRows(input.format, copy, static_cast<int64_t>(bytes.size()), nullptr);
  if (bytes.size() <= kOracleBytes) CheckAgainstOracle(input.format, bytes, nullptr);
}

}  // namespace

bool IsLarge(const uint8_t* data, size_t size) { return size > 0 && (data[0] & 0xf0) == kLarge; }

FuzzCounts& TheFuzzCounts() {
  static FuzzCounts counts;
  return counts;
}

}  // namespace hvd_sparse

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hvd_sparse;
  const Input input = ReadInput(data, size);
  int64_t payload_size = 0;
  const Status status = PayloadSize(input.format, &payload_size);
  CheckLocated(input, input.bytes);
  if (status.ok()) {
    CheckPayload(input, payload_size);
    return 0;
  }
  ++TheFuzzCounts().formats_refused;
  PayloadView view;
  const Status refused = Validate(input.format, input.bytes.data(), static_cast<int64_t>(input.bytes.size()), &view);
  Require(refused.kind == StatusKind::kInvalidArgument, input.format, "reads bytes of a format that cannot be");
  return 0;
}
