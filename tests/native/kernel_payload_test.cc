// Compares the kernels that write, check, decode and add payloads, run on the host, with the core.
#include <algorithm>
#include <numeric>

#include "../../csrc/cuda/pack.h"
#include "../../csrc/cuda/reduce.h"
#include "checksum.h"
#include "device/arrays.h"
#include "reduce.h"

namespace hvd_sparse {
namespace {

constexpr Coding kCodings[] = {Coding::kRunLength, Coding::kEliasFano, Coding::kBitmap, Coding::kAuto, Coding::kDense};
constexpr DType kWireTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kNone};

// k entries of n elements.
struct Entries {
  Entries(int64_t n, int64_t k, uint64_t seed) : indices(static_cast<size_t>(n)) {
    std::mt19937_64 random(seed);
    std::iota(indices.begin(), indices.end(), int64_t{0});
    std::shuffle(indices.begin(), indices.end(), random);
    indices.resize(static_cast<size_t>(k));
    std::sort(indices.begin(), indices.end());
    values = DrawValues<float>(Kind::kNormal, k, seed);
    wide.assign(values.begin(), values.end());
  }
  const void* ValuesFor(DType dtype) const {
    return dtype == DType::kFloat64 ? static_cast<const void*>(wide.data()) : values.data();
  }

  std::vector<int64_t> indices;
  std::vector<float> values;
  std::vector<double> wide;
};

// Bytes with the alignment that kernels need.
using Words = std::vector<uint64_t>;
uint8_t* BytesOf(Words& words) { return reinterpret_cast<uint8_t*>(words.data()); }

Words PackOnHost(const PayloadFormat& format, const Entries& entries, int64_t count, int64_t size) {
  Words payload(static_cast<size_t>(size / 8));
  EXPECT_STATUS(StatusKind::kOk,
                Pack(format, entries.indices.data(), entries.ValuesFor(format.dtype), count, BytesOf(payload)), "pack");
  return payload;
}

void CheckPack(const PayloadFormat& format) {
  PayloadPlan plan{};
  EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &plan), "plan");
  const Entries entries(format.n, format.k, 4);
  for (const int64_t count : {format.k, int64_t{0}}) {
    const Words expected = PackOnHost(format, entries, count, plan.size);
    Words payload(expected.size(), ~uint64_t{0});
    Scratch workspace(pack_workspace_size(plan));
    EXPECT_EQ(cudaSuccess,
              pack_launch(plan, entries.indices.data(), entries.ValuesFor(format.dtype), count, BytesOf(payload),
                          workspace.data(), nullptr),
              "pack");
    EXPECT(expected == payload, count << " of " << format.n << ", coding " << static_cast<int>(format.coding)
                                      << ", type " << static_cast<int>(format.dtype));
  }
}

constexpr std::pair<int64_t, int64_t> kShapes[] = {{1, 1},      {7, 3},       {1000, 10},    {1000, 1000},
                                                   {65'536, 1}, {65'537, 70}, {200'000, 150}};

TEST(PacksTheSameBytes) {
  for (const auto& [n, k] : kShapes) {
    for (const Coding coding : kCodings) {
      if (coding == Coding::kDense && n != k) continue;
      for (const DType dtype : kWireTypes) CheckPack({n, k, coding, dtype});
    }
  }
  CheckPack({70'000, 69'990, Coding::kRunLength, DType::kFloat16});
  CheckPack({70'000, 70'000, Coding::kRunLength, DType::kNone});
}

TEST(IndicesThatDoNotAscendMakeAPayloadThatIsRefused) {
  for (const Coding coding : kCodings) {
    for (const std::vector<int64_t>& indices : {std::vector<int64_t>{3, 3, 4}, {5, 4, 6}, {-1, 4, 6}, {1, 2, 1000}}) {
      const PayloadFormat format{coding == Coding::kDense ? 3 : 1000, 3, coding, DType::kFloat32};
      PayloadPlan plan{};
      EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &plan), "plan");
      Words payload(static_cast<size_t>(plan.size / 8));
      Scratch workspace(pack_workspace_size(plan));
      const float values[] = {1, 2, 3};
      EXPECT_EQ(cudaSuccess, pack_launch(plan, indices.data(), values, 3, BytesOf(payload), workspace.data(), nullptr),
                "pack");
      PayloadView view;
      EXPECT_STATUS(StatusKind::kCorruptPayload, Validate(format, BytesOf(payload), plan.size, &view), "validate");
    }
  }
}

// The kernels' results for one payload.
struct Unpacked {
  Unpacked(const PayloadFormat& format, const uint8_t* payload)
      : indices(static_cast<size_t>(format.k), -7), values(static_cast<size_t>(2 * format.k)) {
    PayloadPlan plan{};
    EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &plan), "plan");
    Scratch workspace(unpack_workspace_size(plan));
    EXPECT_EQ(cudaSuccess,
              unpack_launch(plan, payload, report, indices.data(), values.data(), workspace.data(), nullptr), "unpack");
  }
  bool ok() const { return report[0] == kNoFailure; }

  int64_t report[2] = {-1, -1};
  std::vector<int64_t> indices;
  std::vector<float> values;
};

void CheckUnpack(const PayloadFormat& format, const uint8_t* payload, int64_t size, const std::string& context) {
  PayloadView view;
  const Status expected = Validate(format, payload, size, &view);
  const Unpacked found(format, payload);
  EXPECT_EQ(expected.ok(), found.ok(),
            context << "; the core says \"" << expected.message << "\", check " << found.report[0]);
  if (!expected.ok() || !found.ok()) return;
  EXPECT_EQ(view.entries, found.report[1], context);
  std::vector<int64_t> indices(static_cast<size_t>(view.entries));
  std::vector<float> values(2 * indices.size() + 1);  // nothing has a place, too
  Unpack(format, view, indices.data(), values.data());
  const auto end = found.indices.begin() + view.entries;
  EXPECT_EQ(indices, std::vector<int64_t>(found.indices.begin(), end), context);
  const size_t bytes = indices.size() * (format.dtype == DType::kFloat64 ? 8 : 4);
  EXPECT(bytes == 0 || std::memcmp(values.data(), found.values.data(), bytes) == 0, context);
}

TEST(UnpacksWhatTheCorePacks) {
  for (const auto& [n, k] : kShapes) {
    for (const Coding coding : kCodings) {
      if (coding == Coding::kDense && n != k) continue;
      for (const DType dtype : kWireTypes) {
        const PayloadFormat format{n, k, coding, dtype};
        int64_t size = 0;
        EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "size");
        for (const int64_t count : {k, int64_t{0}}) {
          Words payload = PackOnHost(format, Entries(n, k, 5), count, size);
          CheckUnpack(format, BytesOf(payload), size, std::to_string(count) + " of " + std::to_string(n));
          std::vector<uint8_t> shifted(static_cast<size_t>(size) + 3);  // wherever it lies
          std::memcpy(shifted.data() + 3, payload.data(), static_cast<size_t>(size));
          CheckUnpack(format, shifted.data() + 3, size, "shifted");
        }
      }
    }
  }
  const PayloadFormat full{70'000, 69'990, Coding::kRunLength, DType::kFloat16};
  int64_t size = 0;
  EXPECT_STATUS(StatusKind::kOk, PayloadSize(full, &size), "size");
  Words payload = PackOnHost(full, Entries(70'000, 69'990, 5), full.k, size);
  CheckUnpack(full, BytesOf(payload), size, "a full block");
}

// Corrects the checksum, so that the checks after it are reached.
void Seal(uint8_t* payload, int64_t size) {
  std::memset(payload + 24, 0, 4);
  const uint32_t checksum = Crc32(payload, static_cast<size_t>(size));
  std::memcpy(payload + 24, &checksum, 4);
}

TEST(HostileBytesAreRefusedAsTheCoreRefusesThem) {
  std::mt19937_64 random(6);
  int64_t refused = 0;
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {1000, 10}, {1000, 500}, {70'000, 40}, {70, 70}}) {
    for (const Coding coding : kCodings) {
      if (coding == Coding::kDense && n != k) continue;
      const PayloadFormat format{n, k, coding, DType::kFloat16};
      int64_t size = 0;
      EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "size");
      for (int trial = 0; trial < 60; ++trial) {
        Words payload = PackOnHost(format, Entries(n, k, 7), trial % 5 == 0 ? 0 : k, size);
        for (int flips = 0; flips <= trial % 3; ++flips) {
          const auto area = static_cast<uint64_t>(trial % 2 == 0 ? size : std::min<int64_t>(size, 48));
          BytesOf(payload)[random() % area] ^= static_cast<uint8_t>(1u << (random() % 8));
        }
        if (trial % 4 != 3) Seal(BytesOf(payload), size);
        refused += Unpacked(format, BytesOf(payload)).ok() ? 0 : 1;
        CheckUnpack(format, BytesOf(payload), size, "trial " + std::to_string(trial));
      }
    }
  }
  EXPECT(refused > 300, refused << " payloads were refused");
}

// Payloads of several ranks, one after the other with a gap.
struct Gathered {
  Gathered(const PayloadFormat& format, int64_t ranks) : ranks(ranks) {
    EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "size");
    stride = size + 16;
    bytes.resize(static_cast<size_t>(ranks * stride / 8));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const Entries entries(format.n, format.k, static_cast<uint64_t>(rank));
      const Words payload = PackOnHost(format, entries, rank % 5 == 3 ? 0 : format.k, size);
      std::copy(payload.begin(), payload.end(), bytes.begin() + rank * stride / 8);
    }
  }

  int64_t ranks, size = 0, stride = 0;
  Words bytes;
};

std::vector<float> Reduce(const PayloadFormat& format, Gathered& gathered, DecodeStatus* status) {
  PayloadPlan plan{};
  EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &plan), "plan");
  Scratch workspace(reduce_payloads_workspace_size(plan, gathered.ranks));
  std::vector<float> out(static_cast<size_t>(format.n), 9.0f);
  EXPECT_EQ(cudaSuccess,
            reduce_payloads_launch(plan, BytesOf(gathered.bytes), gathered.ranks, gathered.stride, 0.3f, out.data(),
                                   status, workspace.data(), nullptr),
            "reduce");
  return out;
}

TEST(SumsAreTheCoresOwn) {
  for (const auto& [n, k] :
       {std::pair<int64_t, int64_t>{1, 1}, {900, 300}, {900, 1}, {70'000, 500}, {131'072, 131'072}}) {
    for (const Coding coding : kCodings) {
      if (coding == Coding::kDense && n != k) continue;
      if (coding != Coding::kDense && k > 70'000) continue;
      for (const int64_t ranks : {int64_t{1}, int64_t{3}, int64_t{70}, int64_t{130}}) {
        if (ranks >= 70 && n > 1000) continue;
        const PayloadFormat format{n, k, coding, DType::kFloat16};
        Gathered gathered(format, ranks);
        std::vector<float> expected(static_cast<size_t>(n));
        EXPECT_STATUS(
            StatusKind::kOk,
            ReducePayloads(format, BytesOf(gathered.bytes), ranks, gathered.stride, 0.3f, SerialFor, expected.data()),
            "reduce");
        DecodeStatus status{0, 0};
        EXPECT(SameFloats(expected, Reduce(format, gathered, &status)), k << " of " << n << ", " << ranks << " ranks");
        EXPECT_EQ(0u, status.refused, "status");
      }
    }
  }
}

TEST(TheSumOfNoPayloadsIsZero) {
  Gathered none({900, 300, Coding::kRunLength, DType::kFloat32}, 0);
  DecodeStatus status{0, 0};
  const std::vector<float> zeros(900, 0.0f);
  EXPECT(SameFloats(zeros, Reduce({900, 300, Coding::kRunLength, DType::kFloat32}, none, &status)), "no ranks");
}

TEST(ADamagedPayloadMakesTheSumNanAndIsRecorded) {
  const PayloadFormat format{70'000, 500, Coding::kRunLength, DType::kFloat32};
  Gathered gathered(format, 4);
  BytesOf(gathered.bytes)[2 * gathered.stride + 100] ^= 4;
  DecodeStatus status{0, 0};
  for (int time = 1; time <= 2; ++time) {
    for (const float value : Reduce(format, gathered, &status)) EXPECT(std::isnan(value), value);
    EXPECT_EQ(time, static_cast<int>(status.refused), "calls that met it");
    EXPECT_EQ(2 * 256 + static_cast<int>(PayloadCheck::kChecksum), static_cast<int>(status.first), "rank and check");
  }
}

TEST(ClearsWhatWasSent) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    const PayloadFormat format{5000, 100, Coding::kAuto, dtype};
    PayloadPlan plan{};
    EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &plan), "plan");
    const Entries entries(5000, 100, 8);
    Words payload = PackOnHost(format, entries, 100, plan.size);
    std::vector<float> residual = DrawValues<float>(Kind::kNormal, 5000, 9), velocity = residual;
    const std::vector<float> before = residual;
    DecodeStatus status{0, 0};
    Scratch workspace(unpack_workspace_size(plan));
    const auto clear = [&] {
      const ReduceSelections sent{{plan, BytesOf(payload), {{0, 5000, {residual.data(), velocity.data()}}}}};
      EXPECT_EQ(cudaSuccess, clear_launch(sent, 0, &status, workspace.data(), nullptr), "clear");
    };
    BytesOf(payload)[plan.size - 9] ^= 1;
    clear();
    EXPECT(SameFloats(before, residual) && SameFloats(before, velocity), "nothing changes");
    EXPECT_EQ(1, status.refused, "status");
    BytesOf(payload)[plan.size - 9] ^= 1;
    clear();
    std::vector<float> expected = before, masked = before;
    for (size_t j = 0; j < 100; ++j) {
      const auto i = static_cast<size_t>(entries.indices[j]);
      const float sent = QuantizeOne(entries.values[j], dtype);
      expected[i] = dtype == DType::kFloat32 ? 0.0f : expected[i] - sent;
      masked[i] = 0.0f;
    }
    EXPECT(SameFloats(expected, residual) && SameFloats(masked, velocity), "type " << static_cast<int>(dtype));
  }
}

TEST(PlansOfWhatCannotBeAreRefused) {
  PayloadPlan plan{};
  EXPECT_STATUS(StatusKind::kInvalidArgument, MakePlan({10, 11, Coding::kAuto, DType::kFloat32}, &plan), "k > n");
  EXPECT_STATUS(StatusKind::kInvalidArgument, MakePlan({10, 2, Coding::kAuto, DType::kInt1, {{0, 11}}}, &plan),
                "channels > n");
}

}  // namespace
}  // namespace hvd_sparse
