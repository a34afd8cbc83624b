// Tensors in a joint selection, and their buffers.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "expect.h"
#include "payloads.h"

namespace hvd_sparse {

constexpr float kMissing = -12345.5f;

// The tensors of a joint selection: begin and size of each. Elements outside all tensors are zero.
struct Shape {
  const char* name;
  int64_t n;
  std::vector<std::pair<int64_t, int64_t>> members;
};

inline const std::vector<Shape> kShapes{
    {"one", 3000, {{0, 3000}}},
    {"several", 3000, {{0, 1}, {1, 63}, {64, 64}, {128, 0}, {128, 2049}, {2177, 823}}},
    {"gaps", 3000, {{5, 60}, {65, 700}, {900, 1}, {901, 0}, {1000, 1500}}},
    {"the front missing", 3000, {{1500, 1500}}},
    {"the back missing", 3000, {{0, 1500}}},
    {"empty ones", 3000, {{0, 0}, {0, 3000}, {3000, 0}}},
};

using Floats = std::vector<float>;

inline bool IsMissing(const Shape& shape, int64_t element) {
  return std::none_of(shape.members.begin(), shape.members.end(), [element](const auto& member) {
    return element >= member.first && element < member.first + member.second;
  });
}

inline Floats DrawFloats(const Shape& shape, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<size_t>(shape.n));
  for (int64_t i = 0; i < shape.n; ++i) {
    const float value = normal(random);
    values[static_cast<size_t>(i)] = IsMissing(shape, i) ? 0.0f : value;
  }
  return values;
}

// A buffer of each member: one after the other in a single array, with sentinels where one is missing, or each in a
// heap array of its own.
class Members {
 public:
  Members(const Shape& shape, const Floats& joined, bool contiguous) : shape_(shape), whole_(joined) {
    for (int64_t i = 0; i < shape.n; ++i) {
      if (IsMissing(shape, i)) whole_[static_cast<size_t>(i)] = kMissing;
    }
    for (const auto& [begin, size] : shape.members) {
      own_.emplace_back(joined.begin() + begin, joined.begin() + begin + size);
      data_.push_back(contiguous ? whole_.data() + begin : own_.back().data());
    }
  }
  Members(const Members&) = delete;

  float* data(size_t member) { return data_[member]; }

  void ExpectEqual(const Floats& joined, const std::string& where) const {
    size_t different = 0;
    for (size_t i = 0; i < data_.size(); ++i) {
      for (int64_t j = 0; j < shape_.members[i].second; ++j) {
        const float expected = joined[static_cast<size_t>(shape_.members[i].first + j)];
        different += !SameNumber(static_cast<double>(expected), static_cast<double>(data_[i][j]));
      }
    }
    for (int64_t i = 0; i < shape_.n; ++i) {
      different += IsMissing(shape_, i) && whole_[static_cast<size_t>(i)] != kMissing;
    }
    EXPECT_EQ(size_t{0}, different, where);
  }

 private:
  const Shape& shape_;
  Floats whole_;
  std::vector<Floats> own_;
  std::vector<float*> data_;
};

}  // namespace hvd_sparse
