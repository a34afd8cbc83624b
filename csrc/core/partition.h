// What one rank names of its partition of a model, by a threshold that was known before: MiCRO, Algorithm 1.
#pragma once

#include <array>
#include <vector>

#include "accumulate.h"
#include "parallel.h"
#include "status.h"

namespace hvd_sparse {

constexpr int kMagnitudeShift = 19;   // from the bits of a magnitude to its bin: 1/16 of an octave
constexpr int32_t kSketchBins = 64;   // of the magnitudes around the threshold
constexpr int32_t kSketchBelow = 48;  // of these, how many are below the threshold's own
constexpr int64_t kSketchRun = 16;    // elements that are sampled together: a line of the cache

struct PartitionParams {
  int64_t begin = 0;  // the partition: elements [begin, end) of all parts joined
  int64_t end = 0;
  double threshold = 0;  // infinite where none is known
  // How many should reach the threshold; below 0: as many as do. If fewer than 0.92 times this - 4 do, or more than
  // 1.08 times this + 4, or none, that many are named instead, the largest; a fraction counts now and then.
  double share = -1;
  int64_t sample = 0;  // elements of the partition to sample
  uint64_t seed = 0;   // of the sample, of fractions, and of the order of equal magnitudes
};

struct Partitioned {
  std::vector<int64_t> indices;  // named: ascending, in the parts joined
  double threshold = 0;          // that these reach: the smallest of them if the largest were named
  // How many have which magnitude, estimated: bins [base, base + 64), the last with all that are above.
  int32_t base = 0;
  std::array<float, kSketchBins> sketch{};
};

// Updates the memory of all parts, which ascend and do not overlap, and selects in the partition, in one pass over
// memory where the threshold is good. finite[parts]: of each gradient. Elements of no part count as zero.
Status AccumulatePartition(const std::vector<Part>& parts, const PartitionParams& params,
                           const ParallelFor& parallel_for, bool* finite, Partitioned* result);

}  // namespace hvd_sparse
