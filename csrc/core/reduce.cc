#include "reduce.h"

#include <algorithm>
#include <string>
#include <vector>

#include "run_length.h"

namespace hvd_sparse {
namespace {

// Where each block's entries start.
std::vector<int64_t> Starts(const PayloadView& view) {
  std::vector<int64_t> starts(view.positions.counts.size());
  int64_t total = 0;
  for (size_t block = 0; block < starts.size(); ++block) {
    starts[block] = total;
    total += view.positions.counts[block];
  }
  return starts;
}

void AddBlock(const PayloadView& view, DType dtype, int64_t start, uint32_t count, float scale, float* out) {
  for (int64_t j = start; j < start + count; ++j) {
    out += view.positions.runs[static_cast<size_t>(j)];
    *out++ += scale * ValueAt(view, dtype, j);
  }
}

}  // namespace

Status ReduceSources(PayloadFormat format, const std::vector<Source>& sources, float scale,
                     const ParallelFor& parallel_for, float* out) {
  std::vector<PayloadView> views(sources.size());
  std::vector<std::vector<int64_t>> starts;
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    format.k = sources[rank].k;
    Status status = Validate(format, sources[rank].payload, sources[rank].size, &views[rank]);
    if (!status.ok()) {
      status.message = "from rank " + std::to_string(rank) + ": " + status.message;
      return status;
    }
    starts.push_back(Starts(views[rank]));
  }
  parallel_for(0, BlockCount(format.n), 4, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      float* first = out + block * kBlock;
      std::fill(first, first + BlockLength(format.n, block), 0.0f);
      for (size_t rank = 0; rank < views.size(); ++rank) {
        const auto at = static_cast<size_t>(block);
        AddBlock(views[rank], format.dtype, starts[rank][at], views[rank].positions.counts[at], scale, first);
      }
    }
  });
  return Status::Ok();
}

Status ReducePayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                      const ParallelFor& parallel_for, float* out) {
  int64_t size;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  std::vector<Source> sources;
  for (int64_t rank = 0; rank < ranks; ++rank) sources.push_back({gathered + rank * stride, format.k, size});
  return ReduceSources(format, sources, scale, parallel_for, out);
}

}  // namespace hvd_sparse
