// CPU kernels that process a bucket of variables in one call. For small variables, the overhead of an op exceeds the
// work.
#include <limits>

#include "bucket.h"

namespace hvd_sparse {
namespace {

class AccumulateBucketKernel : public AccumulateBucketBase {
 public:
  using AccumulateBucketBase::AccumulateBucketBase;

 protected:
  absl::Status Fill(const Call& call, const std::vector<Filling>& fillings, bool active, Level level, double* info,
                    bool* finite) const override {
    for (size_t i = 0; i < fillings.size(); ++i) {
      const Filling& filling = fillings[i];
      Selection found;
      TF_RETURN_IF_ERROR(call.Report(AccumulateAndPack(filling.parts, active, filling.select, filling.format, level,
                                                       call.Pool(), filling.payload, finite, &found)));
      finite += filling.parts.size();
      info[2 * i] = found.threshold;
      info[2 * i + 1] = static_cast<double>(found.passed);
    }
    return absl::OkStatus();
  }
};

class ClearBucketKernel : public ClearBucketBase {
 public:
  using ClearBucketBase::ClearBucketBase;

 protected:
  absl::Status Clear(const Call& call, const std::vector<Clearing>& clearings) const override {
    for (const Clearing& clearing : clearings) {
      TF_RETURN_IF_ERROR(call.Report(ClearSent(clearing.format, clearing.payload, clearing.slices, retained_)));
    }
    return absl::OkStatus();
  }
};

class ReduceBucketKernel : public ReduceBucketBase {
 public:
  using ReduceBucketBase::ReduceBucketBase;

 protected:
  absl::Status Reduce(const Call& call, const std::vector<Summing>& summings, int64_t ranks, int64_t stride,
                      float scale) const override {
    std::vector<Sum> sums;
    for (const Summing& summing : summings) {
      sums.push_back({summing.format, {}, summing.slices});
      TF_RETURN_IF_ERROR(
          call.Report(AppendSources(summing.format, summing.first, ranks, stride, &sums.back().sources)));
    }
    return call.Report(ReduceSums(sums, scale, call.Pool()));
  }
};

class TakeSumKernel : public TakeSumBase {
 public:
  using TakeSumBase::TakeSumBase;

 protected:
  absl::Status Spoil(const Call& /*call*/, float* out, int64_t n) const override {
    std::fill_n(out, n, std::numeric_limits<float>::quiet_NaN());
    return absl::OkStatus();
  }
};

HVD_SPARSE_REGISTER(AccumulateBucket);
HVD_SPARSE_REGISTER(ClearBucket);
HVD_SPARSE_REGISTER(ReduceBucket);
HVD_SPARSE_REGISTER(TakeSum);

}  // namespace
}  // namespace hvd_sparse
