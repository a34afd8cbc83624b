// Compares kernels for low-bit values and for payloads of different sizes, run on the host, with the core.
#include "../../csrc/cuda/low_bit.h"
#include "../../csrc/cuda/pack.h"
#include "checksum.h"
#include "device/buckets.h"

namespace hvd_sparse {
namespace {

TEST(LowBitValues) {
  const std::vector<Segments> groupings{{}, {{0, 7}}, {{0, 1}, {64, 64}, {128, 1000}, {2177, 3}}, {{0, 3000}}};
  for (const DType dtype : {DType::kInt2, DType::kInt1}) {
    for (const Level level : {Level::kMean, Level::kMin}) {
      for (const Segments& segments : groupings) {
        Check({AllShapes(), Coding::kAuto, dtype, AccumulateRule::kMomentum, 1.5, false, true, Kind::kNormal, segments,
               level});
      }
    }
    for (const Kind kind : {Kind::kTies, Kind::kZeros, Kind::kConstant, Kind::kDenormal, Kind::kSparse}) {
      Check({AllShapes(), Coding::kDense, dtype, AccumulateRule::kResidual, 1.5, true, true, kind, groupings[2]});
      Check({AllShapes(), Coding::kRunLength, dtype, AccumulateRule::kResidual, 0, true, true, kind, groupings[1]});
    }
  }
}

TEST(ValuesThatAreNotQuantizedMakeAPayloadThatIsRefused) {
  const PayloadFormat format{100, 3, Coding::kRunLength, DType::kInt1};
  PayloadPlan plan{};
  EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &plan), "plan");
  const std::vector<int64_t> indices{1, 2, 50};
  for (const float last : {2.0f, 3.0f}) {
    const std::vector<float> values{2, -2, last};
    Words payload(static_cast<size_t>(plan.size / 8));
    Scratch workspace(pack_workspace_size(plan));
    EXPECT_EQ(cudaSuccess,
              pack_launch(plan, indices.data(), values.data(), 3, BytesOf(payload), workspace.data(), nullptr), "pack");
    PayloadView view;
    const StatusKind expected = last == 2.0f ? StatusKind::kOk : StatusKind::kCorruptPayload;
    EXPECT_STATUS(expected, Validate(format, BytesOf(payload), plan.size, &view), "with " << last);
  }
}

void CheckLowBit(Kind kind, int64_t k, DType dtype, const Segments& segments) {
  const std::vector<float> drawn = DrawValues<float>(kind, k, 4);
  std::vector<int64_t> indices;
  for (int64_t j = 0; j < k; ++j) indices.push_back(3 * j + j % 2);
  std::vector<float> expected = drawn, found = drawn;
  EXPECT_STATUS(StatusKind::kOk,
                QuantizeLowBit(drawn.data(), indices.data(), k, dtype, Level::kMean, segments, expected.data()),
                "quantize");
  PayloadPlan plan{};
  plan.n = kMaxElements;
  plan.k = k;
  SetGroups(dtype, segments, &plan);
  int64_t size = 0;
  EXPECT_EQ(cudaSuccess, quantize_low_bit_workspace_size(plan, &size), "size");
  Scratch workspace(size);
  EXPECT_EQ(cudaSuccess,
            quantize_low_bit_launch(plan, Level::kMean, indices.data(), found.data(), workspace.data(), nullptr),
            "launch");
  EXPECT(SameFloats(expected, found), k << " values of kind " << static_cast<int>(kind) << ", " << segments.size()
                                        << " segments, type " << static_cast<int>(dtype));
}

TEST(LowBitValuesOfASelectionAlone) {
  for (const Segments& segments : {Segments{}, Segments{{0, 10}, {500, 200}}, Segments{{0, 2}}}) {
    for (const DType dtype : {DType::kInt2, DType::kInt1}) {
      for (const Kind kind : kKinds) {
        if (kind == Kind::kNan) continue;  // residuals are never NaN
        for (const int64_t k : {1, 1000, 512, 513, 5000}) CheckLowBit(kind, k, dtype, segments);  // chunks are 512
      }
    }
  }
}

// A rank's payload with any number of entries, in the middle of a buffer.
Words PayloadOf(const PayloadFormat& format, uint64_t rank) {
  std::vector<int64_t> indices;
  for (int64_t j = 0; j < format.k; ++j) indices.push_back(j * (format.n / format.k) + static_cast<int64_t>(rank % 2));
  std::vector<float> values = DrawValues<float>(Kind::kNormal, format.k, rank);
  if (IsLowBit(format.dtype)) {
    EXPECT_STATUS(StatusKind::kOk,
                  QuantizeLowBit(values.data(), indices.data(), format.k, format.dtype, Level::kMean, format.segments,
                                 values.data()),
                  "quantize");
  }
  int64_t size = 0;
  EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "size");
  Words payload(static_cast<size_t>(size / 8));
  EXPECT_STATUS(StatusKind::kOk, Pack(format, indices.data(), values.data(), format.k, BytesOf(payload)), "pack");
  return payload;
}

void CheckLocated(const PayloadFormat& shared, bool damaged) {
  std::vector<Words> payloads;
  std::vector<Source> sources;
  LocatedPayloads located;
  for (const int64_t k : {5, 1, 700, 64}) {
    PayloadFormat format = shared;
    format.k = k;
    payloads.push_back(PayloadOf(format, payloads.size()));
  }
  if (damaged) BytesOf(payloads[2])[50] ^= 2;
  for (Words& payload : payloads) {
    PayloadFormat format = shared;
    std::memcpy(&format.k, BytesOf(payload) + 16, 8);
    sources.push_back({BytesOf(payload), format.k, static_cast<int64_t>(8 * payload.size())});
    located.push_back({{}, BytesOf(payload)});
    EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &located.back().plan), "plan");
  }
  Floats expected(static_cast<size_t>(shared.n), NAN), found(expected.size(), 9.0f);
  const Status status = ReduceSources(shared, sources, 0.3f, SerialFor, {{0, shared.n, expected.data()}});
  EXPECT_EQ(!damaged, status.ok(), status.message);
  DecodeStatus recorded{0, 0};
  Scratch workspace(reduce_located_workspace_size(located));
  EXPECT_EQ(cudaSuccess, reduce_located_launch(located, 0.3f, found.data(), &recorded, workspace.data(), nullptr),
            "reduce");
  EXPECT(SameFloats(expected, found),
         "coding " << static_cast<int>(shared.coding) << ", type " << static_cast<int>(shared.dtype));
  EXPECT_EQ(damaged ? 2 * kChecksEach + static_cast<uint32_t>(PayloadCheck::kChecksum) : 0u,
            static_cast<uint32_t>(recorded.first), "what failed first");
}

TEST(LocatedPayloads) {
  for (const Coding coding : {Coding::kRunLength, Coding::kEliasFano, Coding::kBitmap, Coding::kAuto}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt2, DType::kInt1}) {
      for (const bool damaged : {false, true}) CheckLocated({70'000, 1, coding, dtype, {{0, 10}, {900, 33}}}, damaged);
    }
  }
}

TEST(HostileLowBitValuesAreReadInsideTheirPayload) {
  std::mt19937_64 random(6);
  for (const DType dtype : {DType::kInt2, DType::kInt1}) {
    const PayloadFormat format{3000, 40, Coding::kEliasFano, dtype, {{0, 10}, {900, 33}}};
    for (int trial = 0; trial < 60; ++trial) {
      Words payload = PayloadOf(format, 1);
      const auto size = static_cast<int64_t>(8 * payload.size());
      for (int flips = 0; flips < 3; ++flips) BytesOf(payload)[32 + random() % (size - 32)] ^= 1u << (random() % 8);
      std::memset(BytesOf(payload) + 24, 0, 4);
      const uint32_t checksum = Crc32(BytesOf(payload), static_cast<size_t>(size));
      std::memcpy(BytesOf(payload) + 24, &checksum, 4);
      Floats expected(3000, NAN), found(3000, 9.0f);
      const Status status =
          ReduceSources(format, {{BytesOf(payload), 40, size}}, 1.0f, SerialFor, {{0, 3000, expected.data()}});
      PayloadPlan plan{};
      EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &plan), "plan");
      DecodeStatus recorded{0, 0};
      Scratch workspace(reduce_payloads_workspace_size(plan, 1));
      EXPECT_EQ(cudaSuccess,
                reduce_payloads_launch(plan, BytesOf(payload), 1, 0, 1.0f, found.data(), &recorded, workspace.data(),
                                       nullptr),
                "reduce");
      EXPECT(SameFloats(expected, found), "trial " << trial << ": " << status.message);
    }
  }
}

}  // namespace
}  // namespace hvd_sparse
