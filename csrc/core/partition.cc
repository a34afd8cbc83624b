#include "partition.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "candidates.h"
#include "dtype.h"
#include "multiversion.h"
#include "random.h"
#include "strata.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

constexpr double kLowest = 0.92;  // fraction of the share
constexpr double kHighest = 1.08;
constexpr double kLeeway = 4;      // elements: the number of elements in a small share varies by chance
constexpr double kMargin = 0.98;   // elements above this fraction of the threshold are gathered, in case of too few
constexpr int64_t kTogether = 64;  // runs of the sample that are prefetched together

// Finds the counter of each magnitude: that of its bin, or the last counter for NaN and for magnitudes below all bins.
HVD_SPARSE_MULTIVERSION void FindBins(const float* values, int64_t n, uint32_t lowest, uint32_t base, uint32_t* bins) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = MagnitudeBits(values[i]);
    const uint32_t bin = (bits >> kMagnitudeShift) - base;
    const uint32_t inside = bin < kSketchBins - 1 ? bin : kSketchBins - 1;
    bins[i] = Reaches<float>(bits, lowest) ? inside : static_cast<uint32_t>(kSketchBins);
  }
}

// Counts magnitudes in bins around a threshold (`bar`), and the elements that reach this threshold.
class Sketcher {
 public:
  explicit Sketcher(uint32_t bar)
      : bar_(bar),
        base_(std::max(0, static_cast<int32_t>(bar >> kMagnitudeShift) - kSketchBelow)),
        lowest_(std::max(1u, static_cast<uint32_t>(base_) << kMagnitudeShift)) {}

  void Add(const float* values, int64_t n) {
    std::array<uint32_t, kTested> bins;
    for (int64_t i = 0; i < n; i += kTested) {
      const int64_t size = std::min(kTested, n - i);
      FindBins(values + i, size, lowest_, static_cast<uint32_t>(base_), bins.data());
      for (int64_t j = 0; j < size; ++j) ++counts_[static_cast<size_t>(j % 2)][bins[static_cast<size_t>(j)]];
      reached_ += NumberReaching(values + i, size, bar_);
    }
  }

  int32_t base() const { return base_; }
  int64_t reached() const { return reached_; }

  // Returns how many elements of a bin reach the threshold.
  int64_t above(size_t bin) const {
    if (bin != own()) return bin > own() ? Counted(bin) : 0;
    int64_t count = reached_;
    for (size_t higher = bin + 1; higher < kSketchBins; ++higher) count -= Counted(higher);
    return count;
  }
  int64_t below(size_t bin) const { return Counted(bin) - above(bin); }

 private:
  // Returns the bin that contains the threshold.
  size_t own() const {
    return std::min<size_t>((bar_ >> kMagnitudeShift) - static_cast<uint32_t>(base_), kSketchBins - 1);
  }
  int64_t Counted(size_t bin) const { return counts_[0][bin] + counts_[1][bin]; }

  uint32_t bar_;
  int32_t base_;
  uint32_t lowest_;
  int64_t reached_ = 0;
  std::array<std::array<int64_t, kSketchBins + 1>, 2> counts_{};  // two, so that consecutive increments overlap
};

// If all elements that reach the threshold were selected (`fits`), their exact number is known, and the bins above the
// threshold are scaled to it.
void FillSketch(const Sketcher& sketcher, double scale, bool fits, Partitioned* result) {
  const double exact =
      static_cast<double>(result->indices.size()) / static_cast<double>(std::max<int64_t>(1, sketcher.reached()));
  result->base = sketcher.base();
  for (size_t bin = 0; bin < result->sketch.size(); ++bin) {
    const auto above = static_cast<double>(sketcher.above(bin));
    const auto below = static_cast<double>(sketcher.below(bin));
    result->sketch[bin] = static_cast<float>(above * (fits ? exact : scale) + below * scale);
  }
}

class Selecting {
 public:
  Selecting(const PartitionParams& params, std::vector<Part> parts, const ParallelFor& parallel_for)
      : params_(params),
        rule_(params),
        size_(params.end - params.begin),
        parts_(std::move(parts)),
        parallel_for_(parallel_for) {}

  // Selects all elements that reach the threshold.
  Status RunFilter(bool* finite, Partitioned* result) const {
    result->threshold = params_.threshold;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      std::vector<int64_t> found;
      HVD_SPARSE_RETURN_IF_ERROR(AccumulateFilter(part.gradient, part.params, params_.threshold, parallel_for_,
                                                  part.feedback, finite + i, &found));
      for (const int64_t index : found) result->indices.push_back(params_.begin + part.begin + index);
    }
    return Status::Ok();
  }

  // Selects all elements that reach the threshold, or the largest ones if their number is too far from the share.
  Status RunShared(bool* finite, Partitioned* result) const {
    const uint32_t lowest = CandidateBar<float>(kMargin * params_.threshold);
    const uint32_t bar = CandidateBar<float>(params_.threshold);
    const Candidates<float> none(rule_.most() + 1, lowest, params_.seed);
    Candidates<float> gathered = AccumulateCandidates(parts_, size_, none, parallel_for_, finite);
    Entries reaching;
    std::copy_if(gathered.entries().begin(), gathered.entries().end(), std::back_inserter(reaching),
                 [bar](const auto& entry) { return entry.magnitude >= bar; });
    const bool fits = rule_.Fits(static_cast<int64_t>(reaching.size()));
    result->threshold = params_.threshold;
    if (fits) {
      Take(reaching, result);
    } else if (size_ > 0) {
      HVD_SPARSE_RETURN_IF_ERROR(TakeLargest(std::move(gathered), rule_.wanted(), lowest == 1, result));
    }
    Sketch(fits, result);
    return Status::Ok();
  }

 private:
  using Entries = std::vector<Candidates<float>::Entry>;

  void Take(const Entries& entries, Partitioned* result) const {
    for (const auto& entry : entries) result->indices.push_back(params_.begin + entry.index);
  }

  // Selects the `wanted` largest elements. has_all_nonzero: whether `gathered` has the largest of all nonzero elements.
  // If wanted is 0, nothing is sent, and the threshold is the largest magnitude: the next one starts from it.
  Status TakeLargest(Candidates<float> gathered, int64_t wanted, bool has_all_nonzero, Partitioned* result) const {
    const int64_t m = std::max<int64_t>(1, wanted);
    if (has_all_nonzero || static_cast<int64_t>(gathered.entries().size()) >= m) {
      gathered.CutTo(static_cast<size_t>(m));
      const Entries& largest = gathered.entries();
      uint32_t smallest = largest.empty() ? 0 : kInfinityBits<float>;
      for (const auto& entry : largest) smallest = std::min(smallest, entry.magnitude);
      result->threshold = MagnitudeFromBits(float{}, smallest);
      if (wanted > 0) Take(largest, result);
      return Status::Ok();
    }
    std::vector<float> copy;
    Selection largest;
    const float* values = JoinResiduals(parts_, size_, &copy);
    HVD_SPARSE_RETURN_IF_ERROR(SelectTopK({values, size_, DType::kFloat32},
                                          {m, kRereadMargin * params_.threshold, params_.seed}, parallel_for_,
                                          &largest));
    uint32_t smallest = 0;  // smallest nonzero magnitude
    for (const int64_t index : largest.indices) {
      const uint32_t bits = MagnitudeBits(values[index]);
      if (bits == 0 || bits > kInfinityBits<float>) continue;  // zeros and NaN
      if (smallest == 0 || bits < smallest) smallest = bits;
      if (wanted > 0) result->indices.push_back(params_.begin + index);
    }
    result->threshold = MagnitudeFromBits(float{}, smallest);
    return Status::Ok();
  }

  // Estimates the sketch from a sample.
  void Sketch(bool fits, Partitioned* result) const {
    Sketcher sketcher(CandidateBar<float>(result->threshold));
    Sample(&sketcher);
    FillSketch(sketcher, rule_.scale(), fits, result);
  }

  // Passes a stratified sample of runs, or the whole partition, to the sketcher.
  void Sample(Sketcher* sketcher) const {
    const int64_t wanted = rule_.runs();
    if (wanted == 0) {
      for (const Part& part : parts_) sketcher->Add(part.feedback.residual, part.gradient.size);
      return;
    }
    struct Piece {
      const float* values;
      int64_t size;
    };
    std::vector<Piece> pieces;
    Strata strata(size_ / kSketchRun, wanted, params_.seed);
    auto part = parts_.begin();
    for (int64_t first = 0; first < wanted; first += kTogether) {
      pieces.clear();
      for (int64_t j = first; j < std::min(first + kTogether, wanted); ++j) {
        const int64_t begin = strata.Next() * kSketchRun;
        const int64_t end = begin + kSketchRun;
        while (part != parts_.end() && part->begin + part->gradient.size <= begin) ++part;
        for (auto at = part; at != parts_.end() && at->begin < end; ++at) {
          const int64_t from = std::max(begin, at->begin);
          pieces.push_back(
              {at->feedback.residual + (from - at->begin), std::min(end, at->begin + at->gradient.size) - from});
          __builtin_prefetch(pieces.back().values);
        }
      }
      std::array<float, kTogether * kSketchRun> together;
      float* out = together.data();
      for (const Piece& piece : pieces) out = std::copy_n(piece.values, piece.size, out);
      sketcher->Add(together.data(), out - together.data());
    }
  }

  const PartitionParams& params_;
  PartitionRule rule_;
  int64_t size_;
  std::vector<Part> parts_;
  const ParallelFor& parallel_for_;
};

}  // namespace

PartitionRule::PartitionRule(const PartitionParams& params) {
  const int64_t size = params.end - params.begin;
  const double share = std::clamp(params.share, 0.0, static_cast<double>(std::max<int64_t>(0, size)));
  const double draw = static_cast<double>(Hash(params.seed, static_cast<uint64_t>(params.begin))) * 0x1p-64;
  least_ = kLowest * share - kLeeway;
  most_ = kHighest * share + kLeeway;
  wanted_ = std::min(static_cast<int64_t>(share + draw), size);
  const int64_t runs = size / kSketchRun;
  runs_ = std::max<int64_t>(1, params.sample / kSketchRun);
  if (params.sample >= size || runs_ >= runs) runs_ = 0;
  scale_ = runs_ == 0 ? 1 : static_cast<double>(size) / static_cast<double>(runs_ * kSketchRun);
}

bool PartitionRule::Fits(int64_t count) const {
  return count > 0 && static_cast<double>(count) >= least_ && static_cast<double>(count) <= most_;
}

void SketchSample(const float* sample, int64_t count, const PartitionRule& rule, bool fits, Partitioned* result) {
  Sketcher sketcher(CandidateBar<float>(result->threshold));
  sketcher.Add(sample, count);
  FillSketch(sketcher, rule.scale(), fits, result);
}

Status CheckPartition(const std::vector<Part>& parts, const PartitionParams& params) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckThreshold(params.threshold));
  if (params.begin < 0 || params.end < params.begin) {
    return Status::InvalidArgument("a partition must be 0 <= begin <= end, got " + std::to_string(params.begin) +
                                   " and " + std::to_string(params.end));
  }
  if (std::isnan(params.share)) return Status::InvalidArgument("share must be a number");
  if (params.end > kMaxElements) {
    return Status::InvalidArgument("end must be at most 2^48, got " + std::to_string(params.end));
  }
  int64_t end = 0;
  for (const Part& part : parts) {
    if (part.begin < end) {
      return Status::InvalidArgument("parts must ascend and not overlap: one begins at " + std::to_string(part.begin) +
                                     ", before " + std::to_string(end));
    }
    if (part.begin > kMaxElements - part.gradient.size) {
      return Status::InvalidArgument("parts must end at 2^48 at most: one of " + std::to_string(part.gradient.size) +
                                     " elements begins at " + std::to_string(part.begin));
    }
    end = part.begin + part.gradient.size;
  }
  return Status::Ok();
}

Status AccumulatePartition(const std::vector<Part>& parts, const PartitionParams& params,
                           const ParallelFor& parallel_for, bool* finite, Partitioned* result) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckPartition(parts, params));
  constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();
  std::vector<Part> inside;
  std::vector<size_t> numbers;
  for (size_t i = 0; i < parts.size(); ++i) {
    finite[i] = true;
    for (const Part& outside : {CutPart(parts[i], 0, params.begin), CutPart(parts[i], params.end, kEnd)}) {
      if (outside.gradient.size == 0) continue;
      finite[i] &= Accumulate(outside.gradient, outside.params, parallel_for, outside.feedback);
    }
    const Part cut = CutPart(parts[i], params.begin, params.end);
    if (cut.gradient.size == 0) continue;
    inside.push_back(cut);
    numbers.push_back(i);
  }
  const std::unique_ptr<bool[]> own(new bool[inside.size() + 1]);
  const Selecting selecting(params, std::move(inside), parallel_for);
  HVD_SPARSE_RETURN_IF_ERROR(params.share < 0 ? selecting.RunFilter(own.get(), result)
                                              : selecting.RunShared(own.get(), result));
  for (size_t i = 0; i < numbers.size(); ++i) finite[numbers[i]] &= own[i];
  return Status::Ok();
}

}  // namespace hvd_sparse
