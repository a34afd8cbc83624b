#include "reduce.h"

#include <algorithm>
#include <cstring>
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

using SliceAt = std::vector<Slice>::const_iterator;

// The first slice that ends beyond an element.
SliceAt SliceOf(const std::vector<Slice>& slices, int64_t element) {
  return std::partition_point(slices.begin(), slices.end(),
                              [element](const Slice& slice) { return slice.begin + slice.size <= element; });
}

void ClearRange(const std::vector<Slice>& slices, int64_t begin, int64_t end) {
  for (auto slice = SliceOf(slices, begin); slice != slices.end() && slice->begin < end; ++slice) {
    const int64_t first = std::max(begin - slice->begin, int64_t{0});
    std::fill(slice->out + first, slice->out + std::min(end - slice->begin, slice->size), 0.0f);
  }
}

// `element`: the block's first; value(j): entry j's. What the loop reads is local: nothing that it writes to may change
// it.
template <typename Value>
void AddEntries(const uint16_t* runs, int64_t start, int64_t stop, float scale, int64_t element,
                const std::vector<Slice>& slices, const Value& value) {
  SliceAt at = SliceOf(slices, element);
  if (at == slices.end()) return;
  Slice slice = *at;
  for (int64_t j = start; j < stop; ++j, ++element) {
    element += runs[j];
    while (slice.begin + slice.size <= element) {
      if (++at == slices.end()) return;
      slice = *at;
    }
    if (element >= slice.begin) slice.out[element - slice.begin] += scale * value(j);
  }
}

void AddBlock(const PayloadView& view, DType dtype, int64_t start, uint32_t count, float scale, int64_t element,
              const std::vector<Slice>& slices) {
  const uint16_t* runs = view.positions.runs.data();
  if (dtype != DType::kFloat32) {
    return AddEntries(runs, start, start + count, scale, element, slices,
                      [&view, dtype](int64_t j) { return ValueAt(view, dtype, j); });
  }
  AddEntries(runs, start, start + count, scale, element, slices, [values = view.values](int64_t j) {
    float value;
    std::memcpy(&value, values + j * int64_t{sizeof value}, sizeof value);
    return value;
  });
}

// Adds to what the slices hold, or to zeros.
Status Sum(PayloadFormat format, const std::vector<Source>& sources, float scale, const ParallelFor& parallel_for,
           const std::vector<Slice>& slices, bool from_zeros) {
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
      const int64_t first = block * kBlock;
      if (from_zeros) ClearRange(slices, first, first + BlockLength(format.n, block));
      for (size_t rank = 0; rank < views.size(); ++rank) {
        const auto at = static_cast<size_t>(block);
        AddBlock(views[rank], format.dtype, starts[rank][at], views[rank].positions.counts[at], scale, first, slices);
      }
    }
  });
  return Status::Ok();
}

// Payloads of one format, at one distance.
Status SourcesOf(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride,
                 std::vector<Source>* sources) {
  int64_t size = 0;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  for (int64_t rank = 0; rank < ranks; ++rank) sources->push_back({gathered + rank * stride, format.k, size});
  return Status::Ok();
}

}  // namespace

Status ReduceSources(PayloadFormat format, const std::vector<Source>& sources, float scale,
                     const ParallelFor& parallel_for, const std::vector<Slice>& slices) {
  return Sum(format, sources, scale, parallel_for, slices, true);
}

Status ReducePayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                      const ParallelFor& parallel_for, const std::vector<Slice>& slices) {
  std::vector<Source> sources;
  HVD_SPARSE_RETURN_IF_ERROR(SourcesOf(format, gathered, ranks, stride, &sources));
  return Sum(format, sources, scale, parallel_for, slices, true);
}

Status ReducePayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                      const ParallelFor& parallel_for, float* out) {
  return ReducePayloads(format, gathered, ranks, stride, scale, parallel_for, {{0, format.n, out}});
}

Status AddPayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                   const ParallelFor& parallel_for, float* out) {
  std::vector<Source> sources;
  HVD_SPARSE_RETURN_IF_ERROR(SourcesOf(format, gathered, ranks, stride, &sources));
  return Sum(format, sources, scale, parallel_for, {{0, format.n, out}}, false);
}

}  // namespace hvd_sparse
