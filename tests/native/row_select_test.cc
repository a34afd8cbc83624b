#include "row_select.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "cuts.h"
#include "expect.h"
#include "random.h"

namespace hvd_sparse {
namespace {

Matrix AsMatrix(const Values& values, int64_t columns) {
  return {values.array().data, values.size() / columns, columns, values.dtype()};
}

struct Rows {
  std::vector<uint8_t> mask;
  std::vector<double> thresholds;
};

bool SameDoubles(const std::vector<double>& a, const std::vector<double>& b) {  // NaN is NaN
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof a[i]) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

// By sorting each row.
Rows Sorted(const Values& values, int64_t columns, int64_t k, uint64_t seed) {
  Rows rows{std::vector<uint8_t>(static_cast<size_t>(values.size())), {}};
  for (int64_t begin = 0; begin < values.size(); begin += columns) {
    std::vector<std::tuple<int, double, uint64_t, int64_t>> keys;  // kind, magnitude downwards, tie, column
    for (int64_t c = 0; c < columns; ++c) {
      const double magnitude = values.Magnitude(begin + c);
      const int kind = std::isnan(magnitude) ? 0 : magnitude == 0 ? 2 : 1;
      const auto place = static_cast<uint64_t>(c);
      keys.emplace_back(kind, kind == 1 ? -magnitude : 0.0, kind == 1 ? Hash(seed, place) : place, c);
    }
    std::sort(keys.begin(), keys.end());
    for (int64_t j = 0; j < k; ++j) {
      rows.mask[static_cast<size_t>(begin + std::get<3>(keys[static_cast<size_t>(j)]))] = 1;
    }
    rows.thresholds.push_back(values.Magnitude(begin + std::get<3>(keys[static_cast<size_t>(k - 1)])));
  }
  return rows;
}

Rows Selected(const Values& values, int64_t columns, int64_t k, uint64_t seed, const ParallelFor& parallel_for) {
  Rows rows{std::vector<uint8_t>(static_cast<size_t>(values.size()), 7),
            std::vector<double>(static_cast<size_t>(values.size() / columns), -1.0)};
  EXPECT_STATUS(
      StatusKind::kOk,
      SelectTopKRows(AsMatrix(values, columns), k, seed, parallel_for, rows.mask.data(), rows.thresholds.data()),
      k << " of " << columns);
  return rows;
}

void CheckSelection(const Values& values, int64_t columns, int64_t k, const std::string& context) {
  const Rows expected = Sorted(values, columns, k, 9);
  for (const Cut& cut : AllCuts()) {
    const Rows found = Selected(values, columns, k, 9, cut.run);
    EXPECT(expected.mask == found.mask, context << ", " << cut.name);
    EXPECT(SameDoubles(expected.thresholds, found.thresholds), context << ", " << cut.name);
  }
}

constexpr std::pair<int64_t, int64_t> kShapes[] = {{1, 1}, {5, 1}, {1, 63}, {4, 64}, {3, 1025}, {40, 130}, {2, 40000}};

TEST(SelectsAsSortingDoes) {
  for (const DType dtype : kDTypes) {
    for (const Pattern pattern : kPatterns) {
      for (const auto& [rows, columns] : kShapes) {
        const Values values = Draw(dtype, pattern, rows * columns, 5);
        for (const int64_t k : {int64_t{1}, (columns + 19) / 20, (columns + 1) / 2, columns}) {
          if (!expect::Chosen(3)) continue;
          CheckSelection(values, columns, k,
                         Name(dtype) + std::string(", ") + Name(pattern) + ", " + std::to_string(k) + " of " +
                             std::to_string(columns));
        }
      }
    }
  }
}

// Rows for which the previous row's threshold is a bad guess, including rows of zeros and rows of NaN.
TEST(RowsOfAllScalesFollowEachOther) {
  for (const DType dtype : kDTypes) {
    constexpr int64_t kRows = 60, kColumns = 300;
    const Fields fields = FieldsOf(dtype);
    Values values(dtype, kRows * kColumns);
    std::mt19937_64 random(3);
    for (int64_t row = 0; row < kRows; ++row) {
      const uint64_t exponent = (random() % fields.highest_exponent()) << fields.mantissa_bits;
      for (int64_t c = 0; c < kColumns; ++c) {
        const uint64_t number = exponent | (random() & fields.mantissa_mask());
        const uint64_t kinds[] = {number, 0, fields.infinity() | 1, random() % 2 == 0 ? number : 0, number};
        values.Set(row * kColumns + c, kinds[row % 5]);
      }
    }
    for (const int64_t k : {1, 15, 200}) CheckSelection(values, kColumns, k, Name(dtype));
  }
}

TEST(NoRows) {
  const Values values(DType::kFloat32, 0);
  EXPECT(Selected(values, 5, 2, 0, SerialFor).mask.empty(), "no rows");
}

TEST(SumsInLanes) {
  for (const DType dtype : kDTypes) {
    for (const Pattern pattern : kPatterns) {
      for (const auto& [rows, columns] : kShapes) {
        const Values values = Draw(dtype, pattern, rows * columns, 6);
        for (const Cut& cut : AllCuts()) {
          std::vector<double> found(static_cast<size_t>(rows), -1.0), expected;
          EXPECT_STATUS(StatusKind::kOk, LaplaceThresholdRows(AsMatrix(values, columns), 0.05, cut.run, found.data()),
                        columns);
          for (int64_t row = 0; row < rows; ++row) {
            double lanes[16] = {}, total = 0;
            for (int64_t c = 0; c < columns; ++c) {
              const double magnitude = values.Magnitude(row * columns + c);
              lanes[c % 16] += std::isfinite(magnitude) ? magnitude : 0.0;
            }
            for (const double lane : lanes) total += lane;
            expected.push_back(total / static_cast<double>(columns) * -std::log(0.05));
          }
          EXPECT(SameDoubles(expected, found), Name(dtype) << ", " << Name(pattern) << ", " << columns << " columns");
        }
      }
    }
  }
}

void CheckFilter(const Values& values, int64_t columns, const std::vector<double>& thresholds) {
  for (const Cut& cut : AllCuts()) {
    std::vector<uint8_t> found(static_cast<size_t>(values.size()), 7), expected;
    EXPECT_STATUS(StatusKind::kOk,
                  FilterThresholdRows(AsMatrix(values, columns), thresholds.data(),
                                      static_cast<int64_t>(thresholds.size()), cut.run, found.data()),
                  columns);
    for (int64_t i = 0; i < values.size(); ++i) {
      const double bar = thresholds[thresholds.size() == 1 ? 0 : static_cast<size_t>(i / columns)];
      const double magnitude = values.Magnitude(i);
      expected.push_back(std::isnan(magnitude) || (magnitude > 0 && magnitude >= bar));
    }
    EXPECT(expected == found, Name(values.dtype()) << ", " << columns << " columns, " << cut.name);
  }
}

TEST(FiltersWhatReaches) {
  for (const DType dtype : kDTypes) {
    for (const Pattern pattern : kPatterns) {
      for (const auto& [rows, columns] : kShapes) {
        const Values values = Draw(dtype, pattern, rows * columns, 8);
        for (const double bar : {0.0, -0.0, 5e-324, 1.0, 1e300, std::numeric_limits<double>::infinity()}) {
          if (!expect::Chosen(3)) continue;
          CheckFilter(values, columns, {bar});
        }
        std::vector<double> bars;  // of a value in each row, exactly
        for (int64_t row = 0; row < rows; ++row) {
          const double magnitude = values.Magnitude(row * columns + row % columns);
          bars.push_back(std::isnan(magnitude) ? 1.0 : magnitude);
        }
        CheckFilter(values, columns, bars);
      }
    }
  }
}

TEST(RefusesWhatMakesNoSense) {
  const Values values = Draw(DType::kFloat32, Pattern::kSpread, 12, 1);
  const Matrix matrix = AsMatrix(values, 4);
  uint8_t mask[12];
  double bars[3] = {1, 1, 1};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const int64_t k : {-1, 0, 5}) {
    EXPECT_STATUS(StatusKind::kInvalidArgument, SelectTopKRows(matrix, k, 0, SerialFor, mask, bars), k);
  }
  for (const double density : {0.0, -0.5, 1.5, nan}) {
    EXPECT_STATUS(StatusKind::kInvalidArgument, LaplaceThresholdRows(matrix, density, SerialFor, bars), density);
  }
  for (const int64_t count : {0, 2, 4}) {
    EXPECT_STATUS(StatusKind::kInvalidArgument, FilterThresholdRows(matrix, bars, count, SerialFor, mask), count);
  }
  for (const double bar : {-1.0, nan}) {
    bars[2] = bar;
    EXPECT_STATUS(StatusKind::kInvalidArgument, FilterThresholdRows(matrix, bars, 3, SerialFor, mask), bar);
  }
}

}  // namespace
}  // namespace hvd_sparse
