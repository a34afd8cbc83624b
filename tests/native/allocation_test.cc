// The core allocates little memory while it works, independent of the size of the tensor.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

#include "bucket.h"
#include "expect.h"
#include "reduce.h"

namespace {

std::atomic<int64_t> g_live{0};  // bytes
std::atomic<int64_t> g_peak{0};
std::atomic<int64_t> g_count{0};

constexpr size_t kBefore = alignof(std::max_align_t);  // room for the size of an allocation

}  // namespace

void* operator new(size_t size) {
  void* memory = std::malloc(size + kBefore);
  if (memory == nullptr) throw std::bad_alloc();
  *static_cast<size_t*>(memory) = size;
  const int64_t live = g_live += static_cast<int64_t>(size);
  if (live > g_peak) g_peak = live;
  ++g_count;
  return static_cast<char*>(memory) + kBefore;
}

void operator delete(void* memory) noexcept {
  if (memory == nullptr) return;
  void* start = static_cast<char*>(memory) - kBefore;
  g_live -= static_cast<int64_t>(*static_cast<size_t*>(start));
  std::free(start);
}

void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace hvd_sparse {
namespace {

struct Use {
  int64_t bytes;  // maximum at any time
  int64_t count;
};

template <typename Work>
Use Measure(const Work& work) {
  const int64_t live = g_live, count = g_count;
  g_peak = live;
  work();
  return {g_peak - live, g_count - count};
}

// A step of momentum SGD after the first steps: compress, clear, and the sum of eight payloads.
struct Step {
  Use compress, clear, reduce;
};

Step MeasureStep(int64_t n) {
  const PayloadFormat format{n, n / 1000};
  int64_t size = 0;
  EXPECT(PayloadSize(format, &size).ok(), n);
  const auto count = static_cast<size_t>(n);
  std::vector<float> gradient(count), residual(count), velocity(count), sum(count);
  std::vector<uint8_t> payload(static_cast<size_t>(size)), gathered(8 * payload.size());
  const std::vector<Part> parts{{{gradient.data(), n, DType::kFloat32},
                                 {AccumulateRule::kMomentum, 1, 0.9f, 0, nullptr},
                                 {residual.data(), velocity.data()},
                                 0}};
  const std::vector<FeedbackSlice> slices{{0, n, {residual.data(), velocity.data()}}};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  Step step{};
  double hint = 0;
  for (int turn = 0; turn < 8; ++turn) {
    for (float& value : gradient) value = normal(random);
    Selection found;
    bool finite = false;
    step.compress = Measure([&] {
      EXPECT(AccumulateAndPack(parts, true, {format.k, hint, 0}, format, Level::kMean, SerialFor, payload.data(),
                               &finite, &found)
                 .ok(),
             n);
    });
    hint = 0.98 * found.threshold;
    step.clear = Measure([&] { EXPECT(ClearSent(format, payload.data(), slices).ok(), n); });
    for (size_t rank = 0; rank < 8; ++rank)
      std::copy(payload.begin(), payload.end(), gathered.begin() + static_cast<int64_t>(rank * payload.size()));
    step.reduce =
        Measure([&] { EXPECT(ReducePayloads(format, gathered.data(), 8, size, 1, SerialFor, sum.data()).ok(), n); });
  }
  return step;
}

TEST(PeakIsUnderATwentiethOfTheGradient) {
  constexpr int64_t kElements = 1000003;
  const Step step = MeasureStep(kElements);
  for (const Use& use : {step.compress, step.clear, step.reduce}) {
    std::printf("  %.2f %% of the gradient, %d allocations\n",
                100.0 * static_cast<double>(use.bytes) / (4.0 * kElements), static_cast<int>(use.count));
    EXPECT(use.bytes * 20 <= 4 * kElements, use.bytes << " bytes");
  }
}

// Vectors grow by doubling; nothing is allocated for every entry or block.
TEST(CountDoesNotFollowTheSize) {
  const Step small = MeasureStep(200000), large = MeasureStep(1600000);
  EXPECT(large.compress.count <= small.compress.count + 8, large.compress.count << " and " << small.compress.count);
  EXPECT_EQ(small.clear.count, large.clear.count, "to clear");
  EXPECT_EQ(small.reduce.count, large.reduce.count, "to reduce");
}

}  // namespace
}  // namespace hvd_sparse
