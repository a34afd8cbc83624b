// Where the time of a settled worker's step goes: parts of a DGC compress, and the sum of 8 ranks' payloads, on one
// thread, in turns with a copy of the gradient, in processor time: on a machine with other work to do a clock says
// little. scripts/profile.sh builds and runs it, and again under callgrind.
//
//     profile_core [elements] [settle] [rounds]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "accumulate.h"
#include "bucket.h"
#include "checksum.h"
#include "hint.h"
#include "reduce.h"
#include "run_length.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kRanks = 8;
constexpr float kMomentum = 0.9f;

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "profile_core: %s\n", status.message.c_str());
  std::exit(1);
}

// Gradients whose elements have scales of their own, log-normal, as those of layers do.
class Gradients {
 public:
  explicit Gradients(int64_t n) : scale_(static_cast<size_t>(n)), table_(size_t{1} << 20) {
    std::normal_distribution<float> normal;
    for (float& value : table_) value = normal(random_);
    for (float& value : scale_) value = std::exp(normal(random_));
  }

  void Next(std::vector<float>* gradient) {
    constexpr size_t kPiece = 1024;  // of the table, from anywhere
    for (size_t i = 0; i < gradient->size(); i += kPiece) {
      const size_t start = random_() % (table_.size() - kPiece);
      const size_t end = std::min(gradient->size(), i + kPiece);
      for (size_t j = i; j < end; ++j) (*gradient)[j] = table_[start + j - i] * scale_[j];
    }
  }

 private:
  std::mt19937_64 random_{1};
  std::vector<float> scale_, table_;
};

using Seconds = std::map<std::string, std::vector<double>>;

template <typename Action>
void Time(Seconds* seconds, const char* name, const Action& action) {
  const std::clock_t start = std::clock();
  action();
  (*seconds)[name].push_back(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
}

// One rank's memory of one tensor, and what a compress does, part by part as AccumulateAndPack and ClearSent do it.
struct Worker {
  Worker(int64_t n, int64_t k)
      : format{n, k}, residual(static_cast<size_t>(n)), velocity(residual.size()), bare(velocity), floor(velocity) {
    int64_t size = 0;
    Check(PayloadSize(format, &size));
    payload.resize(static_cast<size_t>(size));
  }

  void Compress(const std::vector<float>& gradient, Seconds* seconds) {
    const Array array{gradient.data(), format.n, DType::kFloat32};
    const std::vector<Part> parts{
        {array, {AccumulateRule::kMomentum, 1, kMomentum, 0, nullptr}, {residual.data(), velocity.data()}, 0}};
    bool finite = false;
    Selection found;
    Time(seconds, "select", [&] {
      Check(AccumulateTopK(parts, format.n, {format.k, HintFor(hint, format.k), 0}, SerialFor, &finite, &found));
    });
    LearnHint(&hint, format.k, found.threshold, found.passed);
    Time(seconds, "pack", [&] {
      std::vector<float> values;
      values.reserve(found.indices.size());
      for (const int64_t index : found.indices) values.push_back(residual[static_cast<size_t>(index)]);
      Check(Pack(format, found.indices.data(), values.data(), format.k, payload.data()));
    });
    Time(seconds, "clear",
         [&] { Check(ClearSent(format, payload.data(), {{0, format.n, {residual.data(), velocity.data()}}})); });
  }

  // The sums of momentum SGD, and nothing else: what no compress can be faster than.
  void AccumulateBare(const std::vector<float>& gradient) {
    const float* __restrict g = gradient.data();
    float* __restrict u = bare.data();
    float* __restrict v = floor.data();
    for (size_t i = 0; i < gradient.size(); ++i) {
      u[i] = kMomentum * u[i] + g[i];
      v[i] += u[i];
    }
  }

  PayloadFormat format;
  std::vector<float> residual, velocity, bare, floor;
  std::vector<uint8_t> payload;
  Hint hint{0, kFirstMargin, 0};
};

// Not inlined, so that callgrind can tell a step of a settled worker from those before.
__attribute__((noinline)) void CompressSettled(Worker* worker, const std::vector<float>& gradient, Seconds* seconds) {
  worker->Compress(gradient, seconds);
}

// The payloads of several ranks, each with places of its own.
std::vector<uint8_t> DrawPayloads(const PayloadFormat& format, size_t size) {
  std::vector<uint8_t> gathered(kRanks * size);
  std::mt19937_64 random(2);
  std::vector<float> values(static_cast<size_t>(format.k), 0.25f);
  for (size_t rank = 0; rank < kRanks; ++rank) {
    std::vector<int64_t> indices;
    while (indices.size() < values.size()) {
      while (indices.size() < values.size())
        indices.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(format.n)));
      std::sort(indices.begin(), indices.end());
      indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
    }
    Check(Pack(format, indices.data(), values.data(), format.k, gathered.data() + rank * size));
  }
  return gathered;
}

// Not inlined, as above.
__attribute__((noinline)) void ReduceAll(const PayloadFormat& format, const std::vector<uint8_t>& gathered,
                                         float* sum) {
  const auto size = static_cast<int64_t>(gathered.size()) / kRanks;
  Check(ReducePayloads(format, gathered.data(), kRanks, size, 1.0f, SerialFor, sum));
}

void ValidateAll(const PayloadFormat& format, const std::vector<uint8_t>& gathered) {
  const auto size = static_cast<int64_t>(gathered.size()) / kRanks;
  std::vector<PayloadView> views(kRanks);
  for (size_t rank = 0; rank < views.size(); ++rank)
    Check(Validate(format, gathered.data() + static_cast<int64_t>(rank) * size, size, &views[rank]));
}

// The places of all payloads, block by block as the sum takes them: known beforehand, to be added to and nothing else.
std::vector<int64_t> PlacesOf(const PayloadFormat& format, const std::vector<uint8_t>& gathered) {
  const auto size = static_cast<int64_t>(gathered.size()) / kRanks;
  std::vector<int64_t> places, indices(static_cast<size_t>(format.k));
  std::vector<float> values(indices.size());
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    PayloadView view;
    Check(Validate(format, gathered.data() + rank * size, size, &view));
    Unpack(format, view, indices.data(), values.data());
    places.insert(places.end(), indices.begin(), indices.end());
  }
  std::stable_sort(places.begin(), places.end(), [](int64_t a, int64_t b) { return a / kBlock < b / kBlock; });
  return places;
}

// The zeros and the sums of a reduction, and nothing else: what none can be faster than.
void ReduceBare(const std::vector<int64_t>& places, const std::vector<float>& terms, std::vector<float>* sum) {
  const auto n = static_cast<int64_t>(sum->size());
  size_t j = 0;
  for (int64_t block = 0; block < BlockCount(n); ++block) {
    const int64_t first = block * kBlock, last = first + BlockLength(n, block);
    std::fill(sum->begin() + first, sum->begin() + last, 0.0f);
    for (; j < places.size() && places[j] < last; ++j) (*sum)[static_cast<size_t>(places[j])] += terms[j];
  }
}

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Bytes that a part must read and write, the gradient's being 4n, in lines of 64 where it touches single elements.
void Print(const Seconds& seconds, double n, double k, double payload) {
  constexpr double kLine = 64;
  const std::pair<const char*, double> parts[] = {{"copy", 8 * n},
                                                  {"bare", 20 * n},
                                                  {"select", 20 * n},
                                                  {"pack", payload + kLine * k},
                                                  {"clear", payload + 4 * kLine * k},
                                                  {"reduce", 4 * n + kRanks * payload},
                                                  {"zeros", 4 * n},
                                                  {"scatter", 4 * n + kRanks * 12 * k},
                                                  {"validate", kRanks * payload},
                                                  {"checksum", kRanks * payload}};
  const double copy = MedianOf(seconds.at("copy"));
  std::printf("%-10s %10s %12s %12s %8s\n", "part", "ms", "over a copy", "MB", "GB/s");
  for (const auto& [name, bytes] : parts) {
    const double median = MedianOf(seconds.at(name));
    std::printf("%-10s %10.3f %12.3f %12.1f %8.1f\n", name, 1e3 * median, median / copy, 1e-6 * bytes,
                1e-9 * bytes / median);
  }
}

}  // namespace

int Run(int64_t n, int settle, int rounds) {
  Gradients source(n);
  Worker worker(n, std::max<int64_t>(1, n / 1000));
  std::vector<float> gradient(static_cast<size_t>(n)), other(gradient), sum(gradient);
  const std::vector<uint8_t> gathered = DrawPayloads(worker.format, worker.payload.size());
  const std::vector<int64_t> places = PlacesOf(worker.format, gathered);
  const std::vector<float> terms(places.size(), 0.25f);
  Seconds seconds;
  for (int step = 0; step < settle; ++step) {
    source.Next(&gradient);
    worker.Compress(gradient, &seconds);
  }
  seconds.clear();
  for (int turn = 0; turn < rounds; ++turn) {
    source.Next(&gradient);
    CompressSettled(&worker, gradient, &seconds);
    Time(&seconds, "bare", [&] { worker.AccumulateBare(gradient); });
    Time(&seconds, "copy", [&] { std::memcpy(other.data(), gradient.data(), 4 * gradient.size()); });
    Time(&seconds, "reduce", [&] { ReduceAll(worker.format, gathered, sum.data()); });
    std::memcpy(other.data(), gradient.data(), 4 * gradient.size());  // takes the payloads out of the caches
    Time(&seconds, "zeros", [&] { std::fill(sum.begin(), sum.end(), 0.0f); });
    std::memcpy(other.data(), gradient.data(), 4 * gradient.size());
    Time(&seconds, "scatter", [&] { ReduceBare(places, terms, &sum); });
    std::memcpy(other.data(), gradient.data(), 4 * gradient.size());
    Time(&seconds, "validate", [&] { ValidateAll(worker.format, gathered); });
    std::memcpy(other.data(), gradient.data(), 4 * gradient.size());
    volatile uint32_t crc = 0;
    Time(&seconds, "checksum", [&] { crc = Crc32(gathered.data(), gathered.size()); });
  }
  Print(seconds, static_cast<double>(n), static_cast<double>(worker.format.k),
        static_cast<double>(worker.payload.size()));
  return 0;
}

}  // namespace hvd_sparse

int main(int count, char** arguments) {
  const auto number = [&](int i, int otherwise) { return count > i ? std::atoi(arguments[i]) : otherwise; };
  return hvd_sparse::Run(number(1, 25600000), number(2, 60), number(3, 15));
}
