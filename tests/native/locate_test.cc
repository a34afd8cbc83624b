#include <random>
#include <string>
#include <vector>

#include "cuts.h"
#include "expect.h"
#include "payloads.h"
#include "reduce.h"

namespace hvd_sparse {
namespace {

const std::vector<int64_t> kNs{70000, 3, 500}, kChannels{7, 3, 20};
const std::vector<std::vector<int64_t>> kCounts{{12, 3, 1}, {66000, 1, 0}, {1, 2, 500}};  // by rank and member

struct Form {
  Coding coding;
  DType dtype;
};

std::string Describe(const Form& form) { return std::string(Name(form.coding)) + " " + Name(form.dtype); }

std::vector<Form> AllForms(const std::vector<DType>& dtypes = {DType::kFloat32, DType::kInt2, DType::kInt1}) {
  std::vector<Form> forms;
  for (const Coding coding : kCodings) {
    for (const DType dtype : dtypes) forms.push_back({coding, dtype});
  }
  return forms;
}

PayloadFormat FormatOf(const Form& form, size_t member, int64_t count) {
  return {kNs[member], std::max<int64_t>(1, count), form.coding, form.dtype, {{0, kChannels[member]}}};
}

std::vector<PayloadFormat> Members(const Form& form) {
  std::vector<PayloadFormat> members;
  for (size_t member = 0; member < kNs.size(); ++member) members.push_back(FormatOf(form, member, 1));
  return members;
}

Bytes MemberPayload(const Form& form, size_t rank, size_t member) {
  const int64_t count = kCounts[rank][member];
  const PayloadFormat format = FormatOf(form, member, count);
  const uint64_t seed = 10 * rank + member;
  if (count == 0) {
    Bytes bytes(PartsOf(format).end);
    EXPECT_STATUS(StatusKind::kOk, Pack(format, nullptr, nullptr, 0, bytes.data()), "empty");
    return bytes;
  }
  return BuildPayload(format, MakeContent(format, ChooseIndices(format.n, count, seed), seed));
}

Bytes WholeMessage(const Form& form, std::vector<size_t>* starts) {
  Bytes bytes;
  for (size_t rank = 0; rank < kCounts.size(); ++rank) {
    for (size_t member = 0; member < kNs.size(); ++member) {
      const Bytes payload = MemberPayload(form, rank, member);
      starts->push_back(bytes.size());
      bytes.insert(bytes.end(), payload.begin(), payload.end());
    }
  }
  return bytes;
}

struct Places {
  std::vector<int64_t> offsets = std::vector<int64_t>(9, -1), ks = std::vector<int64_t>(9, -1);
};

Status Locate(const Form& form, const Bytes& bytes, Places* places) {
  const Exact exact(bytes);
  return LocatePayloads(Members(form), 3, exact.get(), static_cast<int64_t>(bytes.size()), places->offsets.data(),
                        places->ks.data());
}

TEST(FindsEveryPayload) {
  for (const Form& form : AllForms()) {
    std::vector<size_t> starts;
    const Bytes bytes = WholeMessage(form, &starts);
    Places places;
    EXPECT_STATUS(StatusKind::kOk, Locate(form, bytes, &places), Describe(form));
    for (size_t i = 0; i < starts.size(); ++i) {
      EXPECT_EQ(static_cast<int64_t>(starts[i]), places.offsets[i], Describe(form) << " " << i);
      EXPECT_EQ(std::max<int64_t>(1, kCounts[i / 3][i % 3]), places.ks[i], Describe(form) << " " << i);
    }
  }
}

// The payloads of one member in rank order, and the buffers that they are read from.
std::vector<float> SumByHand(const Form& form, size_t member, const Bytes& bytes, const Places& places,
                             std::vector<Source>* sources) {
  std::vector<float> sum(static_cast<size_t>(kNs[member]));
  for (size_t rank = 0; rank < 3; ++rank) {
    const size_t i = 3 * rank + member;
    const PayloadFormat format = FormatOf(form, member, kCounts[rank][member]);
    int64_t size = 0;
    EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "");
    sources->push_back({bytes.data() + places.offsets[i], places.ks[i], size});
    std::vector<int64_t> indices;
    std::vector<uint64_t> values;
    EXPECT(ParsePayload(format, MemberPayload(form, rank, member), &indices, &values), "a payload");
    for (size_t j = 0; j < indices.size(); ++j) {
      sum[static_cast<size_t>(indices[j])] += static_cast<float>(Decode(form.dtype, values[j]));
    }
  }
  return sum;
}

TEST(SumsWhatItFinds) {
  for (const Form& form : AllForms()) {
    std::vector<size_t> starts;
    const Bytes bytes = WholeMessage(form, &starts);
    Places places;
    EXPECT_STATUS(StatusKind::kOk, Locate(form, bytes, &places), "");
    for (size_t member = 0; member < kNs.size(); ++member) {
      std::vector<Source> sources;
      const std::vector<float> expected = SumByHand(form, member, bytes, places, &sources);
      for (const Cut& cut : AllCuts()) {
        std::vector<float> sum(expected.size(), 7.0f);
        EXPECT_STATUS(StatusKind::kOk,
                      ReduceSources(FormatOf(form, member, 1), sources, 1.0f, cut.run, {{0, kNs[member], sum.data()}}),
                      cut.name);
        size_t different = 0;
        for (size_t i = 0; i < sum.size(); ++i) different += !SameNumber(expected[i], sum[i]);
        EXPECT_EQ(size_t{0}, different, Describe(form) << ", member " << member << ", " << cut.name);
      }
    }
  }
}

// The sums of some members, found and added in one call.
Status ReduceSome(const Form& form, const Bytes& bytes, const ParallelFor& parallel_for,
                  std::vector<std::vector<float>>* sums) {
  const Exact exact(bytes);
  std::vector<float*> outs;
  for (std::vector<float>& sum : *sums) outs.push_back(sum.empty() ? nullptr : sum.data());
  return ReduceLocated(Members(form), 3, exact.get(), static_cast<int64_t>(bytes.size()), 1.0f, parallel_for, outs);
}

TEST(SumsTheMembersThatHaveAPlace) {
  for (const Form& form : AllForms()) {
    std::vector<size_t> starts;
    const Bytes bytes = WholeMessage(form, &starts);
    Places places;
    EXPECT_STATUS(StatusKind::kOk, Locate(form, bytes, &places), "");
    for (size_t missing = 0; missing <= kNs.size(); ++missing) {
      if (!expect::Chosen(3)) continue;
      for (const Cut& cut : AllCuts()) {
        std::vector<std::vector<float>> sums;
        for (size_t member = 0; member < kNs.size(); ++member) {
          sums.emplace_back(member == missing ? 0 : static_cast<size_t>(kNs[member]), 7.0f);
        }
        EXPECT_STATUS(StatusKind::kOk, ReduceSome(form, bytes, cut.run, &sums), cut.name);
        for (size_t member = 0; member < kNs.size(); ++member) {
          if (member == missing) continue;
          std::vector<Source> sources;
          const std::vector<float> expected = SumByHand(form, member, bytes, places, &sources);
          size_t different = 0;
          for (size_t i = 0; i < expected.size(); ++i) different += !SameNumber(expected[i], sums[member][i]);
          EXPECT_EQ(size_t{0}, different, Describe(form) << ", member " << member << ", " << cut.name);
        }
      }
    }
  }
}

TEST(ADamagedMessageIsNotSummed) {
  const Form form{Coding::kRunLength, DType::kFloat32};
  std::vector<size_t> starts;
  const Bytes whole = WholeMessage(form, &starts);
  for (const size_t cut : {size_t{1}, whole.size() / 2, whole.size()}) {
    std::vector<std::vector<float>> sums{std::vector<float>(70000, 7.0f), {}, {}};
    EXPECT_STATUS(StatusKind::kCorruptPayload,
                  ReduceSome(form, Bytes(whole.begin(), whole.end() - static_cast<int64_t>(cut)), SerialFor, &sums),
                  cut);
    EXPECT_EQ(std::vector<float>(70000, 7.0f), sums[0], "nothing was added");
  }
  for (const size_t payload : {size_t{0}, size_t{3}, size_t{6}}) {  // the first member of ranks 0, 1 and 2
    for (const size_t place : {0, 5, 16, 17, 18, 40}) {             // 16 to 23: the number of entries
      Bytes bytes = whole;
      bytes[starts[payload] + place] ^= 1;
      std::vector<std::vector<float>> sums{std::vector<float>(70000, 7.0f), {}, {}};
      const Status status = ReduceSome(form, bytes, SerialFor, &sums);
      EXPECT_STATUS(StatusKind::kCorruptPayload, status, "a flipped bit");
      const std::string rank = "from rank " + std::to_string(payload / 3);
      EXPECT(status.message.find(rank) != std::string::npos,
             status.message << ", payload " << payload << ", " << place);
      EXPECT_EQ(std::vector<float>(70000, 7.0f), sums[0], "nothing was added");
    }
  }
}

TEST(OtherChannelsAreNotFound) {
  for (const Form& form : AllForms({DType::kInt2, DType::kInt1})) {
    std::vector<size_t> starts;
    const Bytes bytes = WholeMessage(form, &starts);
    const Exact exact(bytes);
    for (size_t member = 0; member < kNs.size(); ++member) {
      std::vector<PayloadFormat> members = Members(form);
      members[member].segments = {};
      Places places;
      EXPECT_STATUS(StatusKind::kCorruptPayload,
                    LocatePayloads(members, 3, exact.get(), static_cast<int64_t>(bytes.size()), places.offsets.data(),
                                   places.ks.data()),
                    Describe(form) << ", member " << member);
      members[member].segments = {{0, kNs[member] + 1}};
      EXPECT_STATUS(StatusKind::kInvalidArgument,
                    LocatePayloads(members, 3, exact.get(), static_cast<int64_t>(bytes.size()), places.offsets.data(),
                                   places.ks.data()),
                    Describe(form) << ", member " << member);
    }
  }
}

TEST(RefusesCutAndLongMessages) {
  for (const Form& form : AllForms()) {
    std::vector<size_t> starts;
    Bytes bytes = WholeMessage(form, &starts);
    Places places;
    bytes.push_back(0);
    EXPECT_STATUS(StatusKind::kCorruptPayload, Locate(form, bytes, &places), "a byte too many; " << Describe(form));
    bytes.pop_back();
    for (const size_t start : starts) {
      for (const size_t size : {start, start + 1, start + 23, start + 31, start + 32}) {
        const Bytes cut(bytes.begin(), bytes.begin() + static_cast<long>(size));
        EXPECT_STATUS(StatusKind::kCorruptPayload, Locate(form, cut, &places),
                      "cut at " << size << "; " << Describe(form));
      }
    }
  }
}

TEST(SurvivesEveryCountAndNoise) {
  for (const Form& form : AllForms()) {
    std::vector<size_t> starts;
    const Bytes good = WholeMessage(form, &starts);
    Places places;
    for (const size_t start : starts) {
      for (const uint64_t entries : {uint64_t{70001}, uint64_t{1} << 32, uint64_t{1} << 63, ~uint64_t{0}}) {
        Bytes bytes = good;
        WriteNumber(&bytes, start + kEntriesAt, entries, 8);
        EXPECT_STATUS(StatusKind::kCorruptPayload, Locate(form, bytes, &places),
                      "entries " << entries << "; " << Describe(form));
      }
    }
    std::mt19937_64 random(0);
    for (int trial = 0; trial < 2000; ++trial) {
      Bytes bytes(random() % 350);
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() % 4 == 0 ? random() : 0);
      EXPECT_STATUS(StatusKind::kCorruptPayload, Locate(form, bytes, &places),
                    "too few bytes for nine payloads; " << Describe(form));
    }
  }
}

}  // namespace
}  // namespace hvd_sparse
