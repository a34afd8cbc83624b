#include "partition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "expect.h"

namespace hvd_sparse {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::infinity();

// Consecutive tensors of these sizes in heap arrays of exact size; some gradients are not finite.
struct Model {
  std::vector<std::vector<float>> gradients, residuals;
  std::vector<float> expected;  // the residuals joined, after the gradients
  std::vector<bool> is_finite;

  Model(const std::vector<int64_t>& sizes, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (const int64_t size : sizes) {
      std::vector<float> gradient(static_cast<size_t>(size)), residual(static_cast<size_t>(size));
      for (float& value : gradient) value = normal(random);
      for (float& value : residual) value = normal(random);
      is_finite.push_back(size < 50 || random() % 2 == 0);
      if (!is_finite.back()) gradient[static_cast<size_t>(size / 2)] = std::numeric_limits<float>::quiet_NaN();
      for (size_t i = 0; i < gradient.size(); ++i) {
        expected.push_back(residual[i] + (std::isfinite(gradient[i]) ? gradient[i] : 0.0f));
      }
      gradients.push_back(gradient);
      residuals.push_back(residual);
    }
  }

  int64_t n() const { return static_cast<int64_t>(expected.size()); }

  Partitioned Run(const PartitionParams& params) {
    std::vector<Part> parts;
    int64_t begin = 0;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const auto size = static_cast<int64_t>(gradients[i].size());
      parts.push_back({{gradients[i].data(), size, DType::kFloat32}, {}, {residuals[i].data(), nullptr}, begin});
      begin += size;
    }
    const std::unique_ptr<bool[]> finite(new bool[parts.size()]);
    Partitioned found;
    EXPECT_STATUS(StatusKind::kOk, AccumulatePartition(parts, params, SerialFor, finite.get(), &found), "n " << n());
    std::vector<float> joined;
    for (size_t i = 0; i < parts.size(); ++i) {
      joined.insert(joined.end(), residuals[i].begin(), residuals[i].end());
      EXPECT_EQ(static_cast<bool>(is_finite[i]), finite[i], "finite, part " << i);
    }
    EXPECT_EQ(expected, joined, "residuals, n " << n());
    return found;
  }
};

const std::vector<std::vector<int64_t>>& AllSizes() {
  static const std::vector<std::vector<int64_t>> sizes{
      {1}, {2, 1}, {15, 16, 17}, {1000, 1, 4096}, {65'535, 3, 65'537}, {70'000, 70'001, 9}};
  return sizes;
}

// The partitions of all ranks.
std::vector<std::pair<int64_t, int64_t>> Cut(int64_t n, int64_t ranks) {
  std::vector<std::pair<int64_t, int64_t>> cuts;
  for (int64_t rank = 0; rank < ranks; ++rank) cuts.emplace_back(rank * n / ranks, (rank + 1) * n / ranks);
  return cuts;
}

TEST(WithoutAShareEverythingThatReachesTheThresholdIsNamed) {
  for (const auto& sizes : AllSizes()) {
    for (const int64_t ranks : {1, 2, 3, 7}) {
      for (const auto& [begin, end] : Cut(Model(sizes, 1).n(), ranks)) {
        Model model(sizes, 1);
        PartitionParams params;
        params.begin = begin;
        params.end = end;
        params.threshold = 1.5;
        const Partitioned found = model.Run(params);
        std::vector<int64_t> expected;
        for (int64_t i = begin; i < end; ++i) {
          if (std::fabs(model.expected[static_cast<size_t>(i)]) >= 1.5f) expected.push_back(i);
        }
        EXPECT_EQ(expected, found.indices, "from " << begin << " to " << end);
      }
    }
  }
}

// With any threshold, about the share is selected, and the selected elements are the largest.
void TestShare(const std::vector<int64_t>& sizes, int64_t begin, int64_t end, double threshold, double share) {
  Model model(sizes, 2);
  PartitionParams params;
  params.begin = begin;
  params.end = end;
  params.threshold = threshold;
  params.share = share;
  params.sample = 64;
  params.seed = 5;
  const Partitioned found = model.Run(params);
  const auto count = static_cast<double>(found.indices.size());
  const double wanted = std::min(share, static_cast<double>(end - begin));
  EXPECT_EQ(true, count <= 1.08 * wanted + 4 && (count >= 0.92 * wanted - 4), "named " << count << " of " << wanted);
  std::vector<float> named, others;
  size_t at = 0;
  for (int64_t i = begin; i < end; ++i) {
    const bool is_named = at < found.indices.size() && found.indices[at] == i;
    at += is_named;
    (is_named ? named : others).push_back(std::fabs(model.expected[static_cast<size_t>(i)]));
  }
  EXPECT_EQ(found.indices.size(), at, "ascending, in the partition");
  if (!named.empty() && !others.empty()) {
    const float least = *std::min_element(named.begin(), named.end());
    EXPECT_EQ(true, least >= *std::max_element(others.begin(), others.end()), "the largest are named");
  }
  EXPECT_EQ(true, named.empty() || std::isfinite(found.threshold), "threshold");
}

TEST(TheShareIsKeptFromAnyThreshold) {
  for (const auto& sizes : AllSizes()) {
    const int64_t n = Model(sizes, 2).n();
    for (const int64_t ranks : {1, 3}) {
      for (const auto& [begin, end] : Cut(n, ranks)) {
        for (const double threshold : {0.0, 1e-30, 1.0, 3.0, 1e30, kUnknown}) {
          const double most = static_cast<double>(end - begin);
          for (const double share : {1.0, 0.01 * most, 0.5 * most, 2 * most}) {
            if (share >= 1.0) TestShare(sizes, begin, end, threshold, share);
          }
        }
      }
    }
  }
}

TEST(AllZerosAndEmptyPartitionsNameNothing) {
  Model model({100, 31}, 3);
  for (auto& gradient : model.gradients) std::fill(gradient.begin(), gradient.end(), 0.0f);
  for (auto& residual : model.residuals) std::fill(residual.begin(), residual.end(), 0.0f);
  std::fill(model.expected.begin(), model.expected.end(), 0.0f);
  model.is_finite = {true, true};
  PartitionParams params;
  params.threshold = kUnknown;
  params.share = 10;
  params.sample = 32;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 131}, {40, 40}, {131, 131}}) {
    params.begin = begin;
    params.end = end;
    EXPECT_EQ(size_t{0}, model.Run(params).indices.size(), "from " << begin << " to " << end);
  }
}

}  // namespace
}  // namespace hvd_sparse
