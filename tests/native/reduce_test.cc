#include "reduce.h"

#include <algorithm>
#include <tuple>

#include "cuts.h"
#include "expect.h"
#include "payloads.h"

namespace hvd_sparse {
namespace {

constexpr float kSentinel = -12345.5f;

// All ranks' payloads in exactly ranks * stride bytes, less what follows the last payload.
struct Gathered {
  std::vector<Bytes> payloads;
  size_t gap = 0;  // bytes between one payload and the next, as other tensors' in a bucket

  int64_t stride() const { return static_cast<int64_t>(payloads[0].size() + gap); }
  Exact Joined() const {
    Bytes joined;
    for (const Bytes& payload : payloads) {
      joined.insert(joined.end(), payload.begin(), payload.end());
      joined.insert(joined.end(), &payload == &payloads.back() ? 0 : gap, uint8_t{0xEE});
    }
    return Exact(joined);
  }
};

// Adds the entries in a loop over the ranks. Returns false if a payload is invalid.
bool SumByHand(const PayloadFormat& format, const std::vector<Bytes>& payloads, float scale, std::vector<float>* sum) {
  sum->assign(static_cast<size_t>(format.n), 0.0f);
  for (const Bytes& payload : payloads) {
    std::vector<int64_t> indices;
    std::vector<uint64_t> values;
    if (!ParsePayload(format, payload, &indices, &values)) return false;
    for (size_t j = 0; j < indices.size(); ++j) {
      const auto value = static_cast<float>(Decode(format.dtype, values[j]));
      const float product = scale * value;
      (*sum)[static_cast<size_t>(indices[j])] += product;
    }
  }
  return true;
}

// Element i of what is in exactly n floats of the heap.
class Output {
 public:
  explicit Output(int64_t n) : n_(static_cast<size_t>(n)), data_(new float[n_]) { std::fill_n(get(), n_, kSentinel); }
  float* get() { return data_.get(); }

  void ExpectUntouched(const std::string& where) {
    const auto untouched = static_cast<size_t>(std::count(get(), get() + n_, kSentinel));
    EXPECT_EQ(n_, untouched, where);
  }

  void ExpectEqual(const std::vector<float>& expected, const std::string& where) {
    size_t different = 0, first = 0;
    for (size_t i = n_; i-- > 0;) {
      if (SameNumber(expected[i], data_[i])) continue;
      ++different;
      first = i;
    }
    EXPECT(different == 0, different << " of " << n_ << " differ; element " << first << " is " << data_[first]
                                     << ", expected " << expected[first] << "; " << where);
  }

 private:
  size_t n_;
  std::unique_ptr<float[]> data_;
};

void CheckSum(const PayloadFormat& format, const Gathered& gathered, float scale, const std::string& where) {
  std::vector<float> expected;
  EXPECT(SumByHand(format, gathered.payloads, scale, &expected), where);
  const auto ranks = static_cast<int64_t>(gathered.payloads.size());
  const Exact joined = gathered.Joined();
  for (const Cut& cut : AllCuts()) {
    Output out(format.n);
    EXPECT_STATUS(StatusKind::kOk,
                  ReducePayloads(format, joined.get(), ranks, gathered.stride(), scale, cut.run, out.get()), where);
    out.ExpectEqual(expected, where + ", " + cut.name);
  }
}

TEST(MatchesASumInRankOrder) {
  for (const DType dtype : kDTypes) {
    for (const int64_t n : {1, 2, 100, 65535, 65536, 65537, 131072, 5 * 65536 + 77}) {
      for (const int64_t k : {int64_t{1}, n / 50, std::min<int64_t>(n, 3000)}) {
        if (k < 1 || !expect::Chosen(3)) continue;
        const PayloadFormat format{n, k, Coding::kRunLength, dtype};
        Gathered gathered;
        for (uint64_t rank = 0; rank < 4; ++rank) {  // the second contributes nothing
          const auto indices = rank == 1 ? std::vector<int64_t>{} : ChooseIndices(n, k, rank);
          gathered.payloads.push_back(BuildPayload(format, MakeContent(format, indices, rank)));
        }
        const std::string where =
            std::string(Name(dtype)) + ", n = " + std::to_string(n) + ", k = " + std::to_string(k);
        CheckSum(format, gathered, 1.0f, where);
        gathered.gap = 13;  // odd: nothing is aligned
        CheckSum(format, gathered, 1.0f / 3.0f, where + ", with gaps");
        gathered.payloads.resize(1);
        CheckSum(format, gathered, -0.5f, where + ", one rank");
      }
    }
  }
}

TEST(SumsLowBitAndDensePayloads) {
  for (const DType dtype : {DType::kFloat32, DType::kInt2, DType::kInt1}) {
    for (const Coding coding : {Coding::kRunLength, Coding::kDense, Coding::kEliasFano, Coding::kBitmap}) {
      for (const int64_t n : {1, 100, 65537, 140000}) {
        const int64_t k = coding == Coding::kDense ? n : (n + 2) / 3;
        for (const Segments& segments : {Segments{}, Segments{{0, (n + 6) / 7}}, Segments{{0, 1}, {n / 2, 1}}}) {
          if ((segments.size() == 2 && n == 1) || !expect::Chosen(5)) continue;  // one cannot be cut in two
          const PayloadFormat format{n, k, coding, dtype, segments};
          Gathered gathered;
          for (uint64_t rank = 0; rank < 3; ++rank) {  // the second contributes nothing
            const auto indices = rank == 1 ? std::vector<int64_t>{} : ChooseIndices(n, k, rank);
            gathered.payloads.push_back(BuildPayload(format, MakeContent(format, indices, rank)));
          }
          gathered.gap = 13;
          const std::string where = std::string(Name(dtype)) + ", n = " + std::to_string(n) +
                                    ", k = " + std::to_string(k) + ", " + std::to_string(segments.size()) + " segments";
          CheckSum(format, gathered, 1.0f / 3.0f, where);
        }
      }
    }
  }
}

TEST(SumsEveryCoding) {
  for (const Coding coding : kCodings) {
    for (const int64_t n : {1, 2, 100, 65536, 65537, 3 * 65536 + 77}) {
      for (const int64_t k : {int64_t{1}, n / 50, n - 1, n}) {
        if (k < 1 || !expect::Chosen(3)) continue;
        const PayloadFormat format{n, k, coding, k == 1 ? DType::kFloat64 : DType::kFloat16};
        Gathered gathered;
        for (uint64_t rank = 0; rank < 3; ++rank) {  // the second contributes nothing
          const auto indices = rank == 1 ? std::vector<int64_t>{} : ChooseIndices(n, k, rank);
          gathered.payloads.push_back(BuildPayload(format, MakeContent(format, indices, rank)));
        }
        gathered.gap = 13;
        CheckSum(format, gathered, 1.0f / 3.0f,
                 std::string(Name(coding)) + ", n = " + std::to_string(n) + ", k = " + std::to_string(k));
      }
    }
  }
}

// Begins and sizes of slices, in units that cross blocks of 65,536 everywhere and nowhere.
const std::vector<std::vector<std::pair<int64_t, int64_t>>> kSlicings{
    {},
    {{0, 5 * 65536 + 77}},
    {{0, 1}, {1, 65535}, {65536, 0}, {65536, 65536}, {131072, 3 * 65536 + 77}},      // at every end of a block
    {{7, 100}, {200, 65000}, {65530, 20}, {65550, 2 * 65536}, {5 * 65536 + 76, 1}},  // with gaps, across blocks
    {{65536 + 5, 3}, {65536 + 9, 0}, {65536 + 10, 50000}},                           // inside one
    {{2 * 65536, 65536}},
};

// The slices of the sum, each in a separate heap array.
void CheckSlices(const PayloadFormat& format, const Gathered& gathered, const std::vector<Source>& sources,
                 const std::string& where) {
  std::vector<float> expected;
  EXPECT(SumByHand(format, gathered.payloads, 1.0f / 3.0f, &expected), where);
  const auto ranks = static_cast<int64_t>(gathered.payloads.size());
  const Exact joined = gathered.Joined();
  for (const auto& slicing : kSlicings) {
    for (const Cut& cut : AllCuts()) {
      for (const bool from_sources : {false, true}) {
        std::vector<Output> outs;
        std::vector<Slice> slices;
        for (const auto& [begin, size] : slicing) {
          outs.emplace_back(size);
          slices.push_back({begin, size, outs.back().get()});
        }
        std::vector<Source> strided;
        EXPECT_STATUS(StatusKind::kOk, AppendSources(format, joined.get(), ranks, gathered.stride(), &strided), where);
        const Status status = ReduceSources(format, from_sources ? sources : strided, 1.0f / 3.0f, cut.run, slices);
        EXPECT_STATUS(StatusKind::kOk, status, where);
        for (size_t i = 0; i < outs.size(); ++i) {
          const auto begin = expected.begin() + slicing[i].first;
          outs[i].ExpectEqual({begin, begin + slicing[i].second}, where + ", " + cut.name);
        }
      }
    }
  }
}

TEST(SumsIntoSlices) {
  for (const Coding coding : kCodings) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt2}) {
      for (const int64_t k : {5, 3000, 4 * 65536}) {
        if (!expect::Chosen(3)) continue;
        const PayloadFormat format{5 * 65536 + 77, k, coding, dtype};
        Gathered gathered;
        std::vector<Source> sources;
        for (uint64_t rank = 0; rank < 3; ++rank) {  // the second contributes nothing
          const auto indices = rank == 1 ? std::vector<int64_t>{} : ChooseIndices(format.n, k, rank);
          gathered.payloads.push_back(BuildPayload(format, MakeContent(format, indices, rank)));
        }
        gathered.gap = 13;
        for (const Bytes& one : gathered.payloads) sources.push_back({one.data(), k, static_cast<int64_t>(one.size())});
        CheckSlices(format, gathered, sources,
                    std::string(Name(coding)) + ", " + Name(dtype) + ", k = " + std::to_string(k));
      }
    }
  }
}

TEST(OrderOfRanksIsTheOrderOfSums) {
  const PayloadFormat format{3, 3, Coding::kRunLength, DType::kFloat32};
  const float terms[] = {1e8f, 1.0f, -1e8f, 1.0f};  // in another order the sum is not 1
  Gathered gathered;
  for (const float term : terms) {
    const uint64_t bits = FloatToBits(term);
    gathered.payloads.push_back(BuildPayload(format, {{3}, {0, 0, 0}, {bits, bits, bits}}));
  }
  CheckSum(format, gathered, 1.0f, "cancellation");
  Output out(3);
  const Exact joined = gathered.Joined();
  EXPECT_STATUS(StatusKind::kOk, ReducePayloads(format, joined.get(), 4, gathered.stride(), 1.0f, SerialFor, out.get()),
                "");
  out.ExpectEqual({1.0f, 1.0f, 1.0f}, "cancellation");
}

TEST(SumsFullBlocks) {
  const std::tuple<int64_t, int64_t, int64_t> cases[] = {// n, first, k
                                                         {65536, 0, 65536},
                                                         {65537, 0, 65537},
                                                         {131072, 0, 131072},
                                                         {3 * 65536, 65535, 65538},
                                                         {131072, 1, 65536}};
  for (const auto& [n, first, k] : cases) {
    const PayloadFormat format{n, k, Coding::kRunLength, DType::kBFloat16};
    Gathered gathered;
    gathered.payloads.push_back(BuildPayload(format, MakeContent(format, Consecutive(first, k), 1)));
    gathered.payloads.push_back(BuildPayload(format, MakeContent(format, ChooseIndices(n, k, 2), 2)));
    CheckSum(format, gathered, 0.5f, "n = " + std::to_string(n) + ", k = " + std::to_string(k));
  }
}

TEST(NoRanksSumToZero) {
  const PayloadFormat format{70000, 3};
  Output out(format.n);
  EXPECT_STATUS(StatusKind::kOk, ReducePayloads(format, nullptr, 0, 0, 1.0f, SerialFor, out.get()), "");
  out.ExpectEqual(std::vector<float>(70000, 0.0f), "no ranks");
}

TEST(RefusesImpossibleFormats) {
  const std::pair<int64_t, int64_t> wrong[] = {{5, 0}, {5, 6}, {5, -1}, {0, 0}, {-5, -5}};
  for (const auto& [n, k] : wrong) {
    const uint8_t payload[64] = {};
    Output out(5);
    EXPECT_STATUS(StatusKind::kInvalidArgument, ReducePayloads({n, k}, payload, 1, 64, 1.0f, SerialFor, out.get()),
                  "n = " << n << ", k = " << k);
    out.ExpectUntouched("n = " + std::to_string(n));
  }
}

// Two honest ranks and, in between or at either end, `payload`: the sum of all three if that is a payload of the
// format, else an error that names the rank and an untouched output. Returns whether it was accepted.
bool CheckAmongOthers(const PayloadFormat& format, const Bytes& payload, size_t rank, const std::string& where) {
  Gathered gathered;
  for (uint64_t other = 0; other < 2; ++other) {
    const std::vector<int64_t> indices = ChooseIndices(std::min<int64_t>(format.n, 500 + format.k), format.k, other);
    gathered.payloads.push_back(BuildPayload(format, MakeContent(format, indices, other)));
  }
  gathered.payloads.insert(gathered.payloads.begin() + static_cast<std::ptrdiff_t>(rank), payload);
  std::vector<float> expected;
  const bool good = SumByHand(format, gathered.payloads, 1.0f, &expected);
  const Exact joined = gathered.Joined();
  const Cut& cut = AllCuts()[rank % 2];
  Output out(format.n);
  const Status status = ReducePayloads(format, joined.get(), 3, gathered.stride(), 1.0f, cut.run, out.get());
  EXPECT_STATUS(good ? StatusKind::kOk : StatusKind::kCorruptPayload, status, where);
  if (status.ok()) {
    out.ExpectEqual(expected, where);
  } else {
    const std::string name = "rank " + std::to_string(rank) + ":";
    EXPECT(status.message.find(name) != std::string::npos,
           status.message << " does not name " << name << "; " << where);
    out.ExpectUntouched(where);
  }
  return status.ok();
}

const PayloadFormat kSmall{700, 9, Coding::kRunLength, DType::kFloat16};
const std::vector<PayloadFormat> kSmallOnes{kSmall,
                                            {700, 9, Coding::kRunLength, DType::kInt2, {{0, 3}, {300, 90}}},
                                            {700, 9, Coding::kRunLength, DType::kInt1, {{0, 3}}},
                                            {9, 9, Coding::kDense, DType::kInt2, {{0, 2}}},
                                            {9, 9, Coding::kDense, DType::kInt1, {{0, 3}}},
                                            {700, 9, Coding::kEliasFano, DType::kFloat16},
                                            {700, 9, Coding::kEliasFano, DType::kInt2, {{0, 3}, {300, 90}}},
                                            {300, 9, Coding::kBitmap, DType::kFloat16},
                                            {300, 9, Coding::kBitmap, DType::kInt1, {{0, 3}}},
                                            {700, 9, Coding::kAuto, DType::kBFloat16},
                                            {30, 13, Coding::kAuto, DType::kFloat32}};

Bytes SmallPayload(const PayloadFormat& format = kSmall) {
  return BuildPayload(format, MakeContent(format, ChooseIndices(format.n, format.k, 5), 5));
}

TEST(EveryFlippedBitIsRefused) {
  for (const PayloadFormat& format : kSmallOnes) {
    const Bytes payload = SmallPayload(format);
    for (size_t bit = 0; bit < 8 * payload.size(); ++bit) {
      Bytes flipped = payload;
      flipped[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      EXPECT(!CheckAmongOthers(format, flipped, bit % 3, "bit " + std::to_string(bit)), "bit " << bit);
    }
  }
}

TEST(EveryFlippedBitUnderARightChecksumIsRefusedOrSummed) {
  for (const PayloadFormat& format : kSmallOnes) {
    const Bytes payload = SmallPayload(format);
    int accepted = 0, refused = 0;
    for (size_t bit = 0; bit < 8 * payload.size(); ++bit) {
      Bytes flipped = payload;
      flipped[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      Seal(&flipped);
      ++(CheckAmongOthers(format, flipped, bit % 3, "bit " + std::to_string(bit)) ? accepted : refused);
    }
    EXPECT(accepted > 100 && refused > 100, accepted << " accepted, " << refused << " refused");
  }
}

// A truncated message in a buffer of the right size: the rest is zeros, or old content.
TEST(EveryTruncationIsRefused) {
  for (const PayloadFormat& format : kSmallOnes) {
    const Bytes payload = SmallPayload(format);
    for (size_t size = 0; size < payload.size(); ++size) {
      for (const uint8_t rest : {uint8_t{0x00}, uint8_t{0xff}}) {
        Bytes cut = payload;
        std::fill(cut.begin() + static_cast<std::ptrdiff_t>(size), cut.end(), rest);
        if (cut == payload) continue;  // zeros ended it anyway
        EXPECT(!CheckAmongOthers(format, cut, size % 3, std::to_string(size) + " bytes"), size << " bytes");
      }
    }
  }
}

TEST(EveryShiftIsRefused) {
  const Bytes payload = SmallPayload();
  for (size_t by = 1; by < payload.size(); ++by) {
    Bytes shifted = payload;
    std::rotate(shifted.begin(), shifted.begin() + static_cast<std::ptrdiff_t>(by), shifted.end());
    EXPECT(!CheckAmongOthers(kSmall, shifted, by % 3, "by " + std::to_string(by)), "by " << by);
  }
}

TEST(RandomBytesAreRefusedOrSummed) {
  std::mt19937_64 random(13);
  const Bytes payload = SmallPayload();
  for (int i = 0; i < 10000; ++i) {
    Bytes noise(payload.size());
    for (uint8_t& byte : noise) byte = static_cast<uint8_t>(random());
    if (i % 2 == 0) {  // reaches the counts and runs
      std::copy_n(payload.begin(), i % 4 == 0 ? kCountsAt : kCountsAt + 2, noise.begin());
      for (size_t j = 0; j < 9; ++j) WriteNumber(&noise, kCountsAt + 2 + 2 * j, random() % 150, 2);
      Seal(&noise);
    }
    const bool accepted = CheckAmongOthers(kSmall, noise, static_cast<size_t>(i) % 3, "noise " + std::to_string(i));
    if (i % 2 == 1) EXPECT(!accepted, "noise " << i);
  }
}

TEST(LiesUnderARightChecksumAreRefused) {
  size_t rank = 0;
  for (const Lie& lie : AllLies()) {
    EXPECT(!CheckAmongOthers(lie.format, lie.bytes, rank++ % 3, lie.name), lie.name);
  }
}

TEST(OtherFormatsAreRefused) {
  const PayloadFormat others[] = {
      {kSmall.n + 1, 9, Coding::kRunLength, DType::kFloat16}, {kSmall.n - 1, 9, Coding::kRunLength, DType::kFloat16},
      {kSmall.n, 9, Coding::kRunLength, DType::kBFloat16},    {kSmall.n, 10, Coding::kRunLength, DType::kFloat16},
      {kSmall.n, 9, Coding::kEliasFano, DType::kFloat16},     {kSmall.n, 9, Coding::kBitmap, DType::kFloat16},
      {kSmall.n, 9, Coding::kAuto, DType::kFloat16}};
  for (const PayloadFormat& other : others) {
    Bytes bytes = BuildPayload(other, MakeContent(other, ChooseIndices(other.n, other.k, 5), 5));
    bytes.resize(PartsOf(kSmall).end);
    Seal(&bytes);
    EXPECT(!CheckAmongOthers(kSmall, bytes, 1, Name(other.dtype)), "n = " << other.n << ", k = " << other.k);
  }
}

}  // namespace
}  // namespace hvd_sparse
