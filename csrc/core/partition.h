// Selects indices in one rank's partition of a model, with a threshold from the previous step: MiCRO, Algorithm 1.
#pragma once

#include <array>
#include <vector>

#include "accumulate.h"
#include "parallel.h"
#include "status.h"

namespace hvd_sparse {

constexpr int kMagnitudeShift = 19;   // bits of a magnitude >> this = its bin, 1/16 of an octave
constexpr int32_t kSketchBins = 64;   // bins of a sketch: a histogram of the magnitudes around the threshold
constexpr int32_t kSketchBelow = 48;  // bins below the one of the threshold
constexpr int64_t kSketchRun = 16;    // elements sampled together: one cache line

// Fraction of the threshold that is the hint when a partition is read again, because the largest are selected instead.
constexpr double kRereadMargin = 0.9;

struct PartitionParams {
  int64_t begin = 0;  // the partition: elements [begin, end) of the joined parts
  int64_t end = 0;
  double threshold = 0;  // infinity if unknown
  // The number of elements that should reach the threshold; negative: any number may. If no element reaches the
  // threshold, or fewer than 0.92 * share - 4, or more than 1.08 * share + 4, the `share` largest elements are selected
  // instead. A fractional share is rounded up or down at random.
  double share = -1;
  int64_t sample = 0;  // elements of the partition to sample
  uint64_t seed = 0;   // of the sample, of rounding the share, and of the order of equal magnitudes
};

struct Partitioned {
  std::vector<int64_t> indices;  // the selected indices, ascending, in the joined parts
  double threshold = 0;          // the threshold that was used; if the largest were selected, the smallest of these
  // The sketch: the estimated number of elements in bins [base, base + 64). The last bin includes all larger ones.
  int32_t base = 0;
  std::array<float, kSketchBins> sketch{};
};

// Returns InvalidArgument unless AccumulatePartition takes these arguments.
Status CheckPartition(const std::vector<Part>& parts, const PartitionParams& params);

// The decisions of AccumulatePartition, for a device that accumulates and selects by other means. Sizes are those of
// the partition.
class PartitionRule {
 public:
  explicit PartitionRule(const PartitionParams& params);

  // Returns whether this many elements that reach the threshold are selected. If not, the `wanted` largest are.
  bool Fits(int64_t count) const;
  int64_t most() const { return static_cast<int64_t>(most_); }
  int64_t wanted() const { return wanted_; }

  // The number of runs of kSketchRun elements to sample, in as many strata; 0: all elements. An element of the sample
  // represents `scale` elements.
  int64_t runs() const { return runs_; }
  double scale() const { return scale_; }

 private:
  double least_;
  double most_;
  int64_t wanted_;
  int64_t runs_;
  double scale_;
};

// Fills the sketch of a result, which has indices and threshold, from a sample. fits: whether the result has all
// elements that reach the threshold.
void SketchSample(const float* sample, int64_t count, const PartitionRule& rule, bool fits, Partitioned* result);

// Updates the error feedback of all parts and selects elements in the partition. A good threshold makes a single pass
// suffice. The parts must ascend and not overlap; elements outside all parts count as zero. finite[parts]: whether each
// gradient was finite.
Status AccumulatePartition(const std::vector<Part>& parts, const PartitionParams& params,
                           const ParallelFor& parallel_for, bool* finite, Partitioned* result);

}  // namespace hvd_sparse
