#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "run_length.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kGrainBytes = int64_t{1} << 17;  // smallest size of payloads for which another thread pays off

// Returns the number of each block's first entry.
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

// Returns the first slice that ends after an element.
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

// Adds entries [start, stop) of a block with `length` elements, the first of which is `element`. value(j): the value of
// entry j.
template <typename Value>
void AddEntries(const void* runs, int64_t start, int64_t stop, float scale, int64_t element, int64_t length,
                const std::vector<Slice>& slices, const Value& value) {
  SliceAt at = SliceOf(slices, element);
  if (at == slices.end()) return;
  Slice slice = *at;
  if (slice.begin <= element && element + length <= slice.begin + slice.size) {
    float* place = slice.out + (element - slice.begin);
    for (int64_t j = start; j < stop; ++j, ++place) {
      place += RunAt(runs, j);
      *place += scale * value(j);
    }
    return;
  }
  for (int64_t j = start; j < stop; ++j, ++element) {
    element += RunAt(runs, j);
    while (slice.begin + slice.size <= element) {
      if (++at == slices.end()) return;
      slice = *at;
    }
    if (element >= slice.begin) slice.out[element - slice.begin] += scale * value(j);
  }
}

void AddBlock(const PayloadView& view, DType dtype, int64_t start, uint32_t count, float scale, int64_t element,
              int64_t length, const std::vector<Slice>& slices) {
  const void* runs = view.positions.Runs();
  const int64_t stop = start + count;
  if (dtype != DType::kFloat32) {
    return AddEntries(runs, start, stop, scale, element, length, slices,
                      [&view, dtype](int64_t j) { return ValueAt(view, dtype, j); });
  }
  AddEntries(runs, start, stop, scale, element, length, slices, [values = view.values](int64_t j) {
    float value;
    std::memcpy(&value, values + j * int64_t{sizeof value}, sizeof value);
    return value;
  });
}

// A validated payload, and the number of each block's first entry.
struct Addend {
  PayloadView view;
  std::vector<int64_t> starts;
};

// Computes the sum of blocks [begin, end).
void SumBlocks(const PayloadFormat& format, const std::vector<Addend>& addends, float scale, int64_t begin, int64_t end,
               const std::vector<Slice>& slices) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kBlock;
    const int64_t length = BlockLength(format.n, block);
    ClearRange(slices, first, first + length);
    for (const Addend& addend : addends) {
      const auto at = static_cast<size_t>(block);
      AddBlock(addend.view, format.dtype, addend.starts[at], addend.view.positions.counts[at], scale, first, length,
               slices);
    }
  }
}

Status ValidateSource(PayloadFormat format, const Source& source, Addend* addend) {
  format.k = source.k;
  HVD_SPARSE_RETURN_IF_ERROR(Validate(format, source.payload, source.size, &addend->view));
  addend->starts = Starts(addend->view);
  return Status::Ok();
}

// Validates the payloads of all sums, several at a time. addends[sum][rank].
Status ValidateAll(const std::vector<Sum>& sums, const ParallelFor& parallel_for,
                   std::vector<std::vector<Addend>>* addends) {
  struct Job {
    size_t sum;
    size_t rank;
    Status status;
  };
  std::vector<Job> jobs;
  int64_t bytes = 1;
  for (size_t sum = 0; sum < sums.size(); ++sum) {
    addends->emplace_back(sums[sum].sources.size());
    for (size_t rank = 0; rank < sums[sum].sources.size(); ++rank) {
      jobs.push_back({sum, rank, Status::Ok()});
      bytes += sums[sum].sources[rank].size;
    }
  }
  const auto count = static_cast<int64_t>(jobs.size());
  parallel_for(0, count, 1 + count * kGrainBytes / bytes, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      auto& [sum, rank, status] = jobs[i];
      status = ValidateSource(sums[sum].format, sums[sum].sources[rank], &(*addends)[sum][rank]);
    }
  });
  for (Job& job : jobs) {
    if (!job.status.ok()) return FromRank(static_cast<int64_t>(job.rank), std::move(job.status));
  }
  return Status::Ok();
}

}  // namespace

Status ReduceSums(const std::vector<Sum>& sums, float scale, const ParallelFor& parallel_for) {
  std::vector<std::vector<Addend>> addends;
  HVD_SPARSE_RETURN_IF_ERROR(ValidateAll(sums, parallel_for, &addends));
  for (size_t i = 0; i < sums.size(); ++i) {
    const Sum& sum = sums[i];
    parallel_for(0, BlockCount(sum.format.n), 4,
                 [&](int64_t begin, int64_t end) { SumBlocks(sum.format, addends[i], scale, begin, end, sum.slices); });
  }
  return Status::Ok();
}

Status ReduceSources(const PayloadFormat& format, const std::vector<Source>& sources, float scale,
                     const ParallelFor& parallel_for, const std::vector<Slice>& slices) {
  return ReduceSums({{format, sources, slices}}, scale, parallel_for);
}

Status AppendSources(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride,
                     std::vector<Source>* sources) {
  int64_t size = 0;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  for (int64_t rank = 0; rank < ranks; ++rank) sources->push_back({gathered + rank * stride, format.k, size});
  return Status::Ok();
}

Status ReduceLocated(const std::vector<PayloadFormat>& members, int64_t ranks, const uint8_t* gathered, int64_t size,
                     float scale, const ParallelFor& parallel_for, const std::vector<float*>& outs) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckRanks(ranks));
  const auto count = static_cast<size_t>(ranks) * members.size();
  std::vector<int64_t> offsets(count), ks(count);
  HVD_SPARSE_RETURN_IF_ERROR(LocatePayloads(members, ranks, gathered, size, offsets.data(), ks.data()));
  std::vector<Sum> sums;
  for (size_t i = 0; i < members.size(); ++i) {
    if (outs[i] == nullptr) continue;
    PayloadFormat format = members[i];
    std::vector<Source> sources;
    for (size_t at = i; at < count; at += members.size()) {
      Source source{gathered + offsets[at], ks[at], 0};
      format.k = source.k;
      HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &source.size));
      sources.push_back(source);
    }
    sums.push_back({format, std::move(sources), {{0, format.n, outs[i]}}});
  }
  return ReduceSums(sums, scale, parallel_for);
}

Status ReducePayloads(const PayloadFormat& format, const uint8_t* gathered, int64_t ranks, int64_t stride, float scale,
                      const ParallelFor& parallel_for, float* out) {
  std::vector<Source> sources;
  HVD_SPARSE_RETURN_IF_ERROR(AppendSources(format, gathered, ranks, stride, &sources));
  return ReduceSources(format, sources, scale, parallel_for, {{0, format.n, out}});
}

}  // namespace hvd_sparse
