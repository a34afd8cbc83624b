#include <random>
#include <string>
#include <vector>

#include "cuts.h"
#include "expect.h"
#include "payloads.h"
#include "reduce.h"

namespace hvd_sparse {
namespace {

const std::vector<int64_t> kNs{70000, 3, 500};
const std::vector<std::vector<int64_t>> kCounts{{12, 3, 1}, {66000, 1, 0}, {1, 2, 500}};  // by rank and member

PayloadFormat FormatOf(int64_t n, int64_t count) {
  return {n, std::max<int64_t>(1, count), Coding::kRunLength, DType::kFloat32};
}

Bytes MemberPayload(int64_t n, int64_t count, uint64_t seed) {
  const PayloadFormat format = FormatOf(n, count);
  if (count == 0) {
    Bytes bytes(PartsOf(format).end);
    EXPECT_STATUS(StatusKind::kOk, Pack(format, nullptr, nullptr, 0, bytes.data()), "empty");
    return bytes;
  }
  return BuildPayload(format, MakeContent(format, ChooseIndices(n, count, seed), seed));
}

Bytes WholeMessage(std::vector<size_t>* starts) {
  Bytes bytes;
  for (size_t rank = 0; rank < kCounts.size(); ++rank) {
    for (size_t member = 0; member < kNs.size(); ++member) {
      const Bytes payload = MemberPayload(kNs[member], kCounts[rank][member], 10 * rank + member);
      starts->push_back(bytes.size());
      bytes.insert(bytes.end(), payload.begin(), payload.end());
    }
  }
  return bytes;
}

struct Places {
  std::vector<int64_t> offsets = std::vector<int64_t>(9, -1), ks = std::vector<int64_t>(9, -1);
};

Status Locate(const Bytes& bytes, Places* places) {
  const Exact exact(bytes);
  return LocatePayloads(kNs, Coding::kRunLength, DType::kFloat32, 3, exact.get(), static_cast<int64_t>(bytes.size()),
                        places->offsets.data(), places->ks.data());
}

TEST(FindsEveryPayload) {
  std::vector<size_t> starts;
  const Bytes bytes = WholeMessage(&starts);
  Places places;
  EXPECT_STATUS(StatusKind::kOk, Locate(bytes, &places), "");
  for (size_t i = 0; i < starts.size(); ++i) {
    EXPECT_EQ(static_cast<int64_t>(starts[i]), places.offsets[i], i);
    EXPECT_EQ(std::max<int64_t>(1, kCounts[i / 3][i % 3]), places.ks[i], i);
  }
}

TEST(SumsWhatItFinds) {
  std::vector<size_t> starts;
  const Bytes bytes = WholeMessage(&starts);
  Places places;
  EXPECT_STATUS(StatusKind::kOk, Locate(bytes, &places), "");
  for (size_t member = 0; member < kNs.size(); ++member) {
    std::vector<float> expected(static_cast<size_t>(kNs[member]));
    std::vector<Source> sources;
    for (size_t rank = 0; rank < 3; ++rank) {
      const size_t i = 3 * rank + member;
      const PayloadFormat format = FormatOf(kNs[member], kCounts[rank][member]);
      int64_t size = 0;
      EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "");
      sources.push_back({bytes.data() + places.offsets[i], places.ks[i], size});
      std::vector<int64_t> indices;
      std::vector<uint64_t> values;
      const Bytes payload = MemberPayload(kNs[member], kCounts[rank][member], 10 * rank + member);
      EXPECT(ParsePayload(format, payload, &indices, &values), "a payload");
      for (size_t j = 0; j < indices.size(); ++j) {
        expected[static_cast<size_t>(indices[j])] += static_cast<float>(Decode(format.dtype, values[j]));
      }
    }
    for (const Cut& cut : AllCuts()) {
      std::vector<float> sum(expected.size(), 7.0f);
      EXPECT_STATUS(StatusKind::kOk, ReduceSources(FormatOf(kNs[member], 1), sources, 1.0f, cut.run, sum.data()),
                    cut.name);
      size_t different = 0;
      for (size_t i = 0; i < sum.size(); ++i) different += !SameNumber(expected[i], sum[i]);
      EXPECT_EQ(size_t{0}, different, "member " << member << ", " << cut.name);
    }
  }
}

TEST(RefusesCutAndLongMessages) {
  std::vector<size_t> starts;
  Bytes bytes = WholeMessage(&starts);
  Places places;
  bytes.push_back(0);
  EXPECT_STATUS(StatusKind::kCorruptPayload, Locate(bytes, &places), "a byte too many");
  bytes.pop_back();
  for (const size_t start : starts) {
    for (const size_t size : {start, start + 1, start + 23, start + 31, start + 32}) {
      EXPECT_STATUS(StatusKind::kCorruptPayload,
                    Locate(Bytes(bytes.begin(), bytes.begin() + static_cast<long>(size)), &places), "cut at " << size);
    }
  }
}

TEST(SurvivesEveryCountAndNoise) {
  std::vector<size_t> starts;
  const Bytes good = WholeMessage(&starts);
  Places places;
  for (const size_t start : starts) {
    for (const uint64_t entries : {uint64_t{70001}, uint64_t{1} << 32, uint64_t{1} << 63, ~uint64_t{0}}) {
      Bytes bytes = good;
      WriteNumber(&bytes, start + kEntriesAt, entries, 8);
      EXPECT_STATUS(StatusKind::kCorruptPayload, Locate(bytes, &places), "entries " << entries);
    }
  }
  std::mt19937_64 random(0);
  for (int trial = 0; trial < 2000; ++trial) {
    Bytes bytes(random() % 400);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() % 4 == 0 ? random() : 0);
    EXPECT_STATUS(StatusKind::kCorruptPayload, Locate(bytes, &places), "too few bytes for nine payloads");
  }
}

}  // namespace
}  // namespace hvd_sparse
