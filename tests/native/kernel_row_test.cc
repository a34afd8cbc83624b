// Compares the kernels that select in rows, run on the host, with the core.
#include <limits>
#include <string>

#include "../../csrc/cuda/row_select.h"
#include "device/arrays.h"

namespace hvd_sparse {
namespace {

constexpr std::pair<int64_t, int64_t> kShapes[] = {{1, 1}, {3, 1}, {20, 5}, {2, 256}, {2, 3001}, {0, 4}};

bool SameDoubles(const std::vector<double>& a, const std::vector<double>& b) {  // NaN is NaN
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof a[i]) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return a.size() == b.size();
}

// Values of one kind in a shape, and the results of the core and of the kernels.
template <typename T>
class Case {
 public:
  Case(Kind kind, int64_t rows, int64_t columns)
      : values_(DrawValues<T>(kind, rows * columns, static_cast<uint64_t>(columns))),
        matrix_{values_.data(), rows, columns, kDTypeOf<T>},
        context_("kind " + std::to_string(static_cast<int>(kind)) + ", " + std::to_string(rows) + " x " +
                 std::to_string(columns)) {}

  void CheckSelection(int64_t k) {
    Reset();
    EXPECT_STATUS(StatusKind::kOk, SelectTopKRows(matrix_, k, 7, SerialFor, mask_.data(), bars_.data()), context_);
    EXPECT_EQ(cudaSuccess, select_top_k_rows_launch(matrix_, k, 7, found_mask_.data(), found_bars_.data(), nullptr),
              context_);
    EXPECT(mask_ == found_mask_, context_ << ", k = " << k);
    EXPECT(SameDoubles(bars_, found_bars_), context_ << ", k = " << k);
  }

  void CheckLaplace(double density) {
    Reset();
    double factor = 0;
    EXPECT_STATUS(StatusKind::kOk, LaplaceFactor(density, &factor), density);
    EXPECT_STATUS(StatusKind::kOk, LaplaceThresholdRows(matrix_, density, SerialFor, bars_.data()), context_);
    EXPECT_EQ(cudaSuccess, laplace_threshold_rows_launch(matrix_, factor, found_bars_.data(), nullptr), context_);
    EXPECT(SameDoubles(bars_, found_bars_), context_ << ", density " << density);
  }

  void CheckFilter(const std::vector<double>& bars) {
    Reset();
    const auto count = static_cast<int64_t>(bars.size());
    EXPECT_STATUS(StatusKind::kOk, FilterThresholdRows(matrix_, bars.data(), count, SerialFor, mask_.data()), context_);
    EXPECT_EQ(cudaSuccess, filter_threshold_rows_launch(matrix_, bars.data(), count, found_mask_.data(), nullptr),
              context_);
    EXPECT(mask_ == found_mask_, context_ << ", " << count << " thresholds");
  }

  void CheckAll() {
    for (const int64_t k : {int64_t{1}, (matrix_.columns + 19) / 20, matrix_.columns / 2, matrix_.columns}) {
      if (k > 0) CheckSelection(k);
    }
    for (const double density : {0.05, 1.0}) CheckLaplace(density);
    for (const double bar : {0.0, 5e-324, 1.0, 1e300, std::numeric_limits<double>::infinity()}) CheckFilter({bar});
    std::vector<double> bars;
    for (int64_t row = 0; row < matrix_.rows; ++row) bars.push_back(0.5 * static_cast<double>(row));
    CheckFilter(bars);
  }

 private:
  void Reset() {
    const auto rows = static_cast<size_t>(matrix_.rows);
    mask_.assign(values_.size(), 5);
    found_mask_.assign(values_.size(), 6);
    bars_.assign(rows, -1.0);
    found_bars_.assign(rows, -2.0);
  }

  std::vector<T> values_;
  Matrix matrix_;
  std::string context_;
  std::vector<uint8_t> mask_, found_mask_;
  std::vector<double> bars_, found_bars_;
};

template <typename T>
void CheckKinds() {
  for (const Kind kind : kKinds) {
    for (const auto& [rows, columns] : kShapes) Case<T>(kind, rows, columns).CheckAll();
  }
}

TEST(RowsOfFloat32) { CheckKinds<float>(); }
TEST(RowsOfFloat64) { CheckKinds<double>(); }
TEST(RowsOfFloat16) { CheckKinds<Float16>(); }
TEST(RowsOfBFloat16) { CheckKinds<BFloat16>(); }

TEST(ThresholdsThatAreNone) {
  const std::vector<float> values{0.0f, 1.0f, INFINITY, NAN};
  const Matrix matrix{values.data(), 1, 4, DType::kFloat32};
  std::vector<uint8_t> mask(4);
  const double below = -1, missing = NAN;
  EXPECT_EQ(cudaSuccess, filter_threshold_rows_launch(matrix, &below, 1, mask.data(), nullptr), "below 0");
  EXPECT(mask == (std::vector<uint8_t>{0, 1, 1, 1}), "below 0");
  EXPECT_EQ(cudaSuccess, filter_threshold_rows_launch(matrix, &missing, 1, mask.data(), nullptr), "NaN");
  EXPECT(mask == (std::vector<uint8_t>{0, 0, 1, 1}), "NaN");
}

}  // namespace
}  // namespace hvd_sparse
