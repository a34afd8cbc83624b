#include "plan.h"

#include "../core/checksum.h"
#include "../core/elias_fano.h"
#include "../core/run_length.h"

namespace hvd_sparse {
namespace {

// Returns the number that turns the remainder of `size` bytes into their checksum by exclusive or.
uint32_t ChecksumStart(int64_t size) {
  static constexpr CrcPowers kPowers = MakeCrcPowers();
  return ~CrcShift(0xffffffffu, static_cast<uint64_t>(size), kPowers);
}

}  // namespace

Status MakePlan(const PayloadFormat& format, PayloadPlan* plan) {
  int64_t size = 0;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  const int64_t n = format.n;
  const int64_t k = format.k;
  *plan = {};
  plan->header = MakeHeader(format, k);
  plan->coding = ResolveCoding(format.coding, n, k);
  plan->dtype = format.dtype;
  plan->n = n;
  plan->k = k;
  plan->size = size;
  plan->blocks = BlockCount(n);
  plan->full_at = kPositionsAt + FullAt(n);
  plan->runs_at = kPositionsAt + RunsAt(n, k);
  plan->has_full = k >= kBlock;
  plan->bits_at = kPositionsAt;
  plan->bits = n;
  if (plan->coding == Coding::kEliasFano) {
    plan->low = EliasFanoLowBits(n, k);
    plan->lower_bytes = EliasFanoLowerSize(n, k);
    plan->bits_at += plan->lower_bytes;
    plan->bits = ((n - 1) >> plan->low) + k;
  }
  plan->values_at = ValuesAt(format);
  plan->checksum_start = ChecksumStart(size);
  SetGroups(format.dtype, format.segments, plan);
  if (plan->code_bits > 0) {
    const int64_t codes = (plan->code_bits * k + 7) / 8;
    plan->codes_at = plan->values_at + LowBitSize(format.dtype, k, format.segments) - codes;
  }
  return Status::Ok();
}

void SetGroups(DType dtype, const Segments& segments, PayloadPlan* plan) {
  plan->code_bits = dtype == DType::kInt2 ? 2 : dtype == DType::kInt1 ? 1 : 0;
  plan->groups = 1;
  plan->channels.clear();
  if (plan->code_bits == 0 || segments.empty()) return;
  plan->groups = 0;
  for (const Segment& segment : segments) {
    plan->channels.push_back({segment.begin, segment.channels, plan->groups});
    plan->groups += segment.channels;
  }
}

}  // namespace hvd_sparse
