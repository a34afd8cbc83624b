#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "run_length.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kLine = 16;  // float32 in a line of the cache

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

// Adds to places that a cache holds.
struct AddAtOnce {
  void To(float* place, float term) const { *place += term; }
  void Finish() const {}
};

// Adds to places that no cache holds, in the same order, but fetches them ahead: what takes the time is to wait for
// them. Each waits for as many others as hide how long memory takes.
class AddFetched {
 public:
  AddFetched() {
    for (Term& term : waiting_) term = {&nowhere_, 0};
  }
  AddFetched(const AddFetched&) = delete;

  void To(float* place, float term) {
    __builtin_prefetch(place, 1);
    Term& next = waiting_[at_++ % kAhead];
    *next.place += next.term;
    next = {place, term};
  }

  void Finish() {
    for (size_t i = 0; i < kAhead; ++i) To(&nowhere_, 0);
  }

 private:
  struct Term {
    float* place;
    float term;
  };
  static constexpr size_t kAhead = 64;
  float nowhere_ = 0;
  Term waiting_[kAhead];
  size_t at_ = 0;
};

// `element`: the block's first of `length`; value(j): entry j's.
template <typename Value, typename Add>
void AddEntries(const void* runs, int64_t start, int64_t stop, float scale, int64_t element, int64_t length,
                const std::vector<Slice>& slices, const Value& value, Add* add) {
  SliceAt at = SliceOf(slices, element);
  if (at == slices.end()) return;
  Slice slice = *at;
  if (slice.begin <= element && element + length <= slice.begin + slice.size) {
    float* place = slice.out + (element - slice.begin);
    for (int64_t j = start; j < stop; ++j, ++place) {
      place += RunAt(runs, j);
      add->To(place, scale * value(j));
    }
    return;
  }
  for (int64_t j = start; j < stop; ++j, ++element) {
    element += RunAt(runs, j);
    while (slice.begin + slice.size <= element) {
      if (++at == slices.end()) return;
      slice = *at;
    }
    if (element >= slice.begin) add->To(slice.out + (element - slice.begin), scale * value(j));
  }
}

template <typename Add>
void AddBlock(const PayloadView& view, DType dtype, int64_t start, uint32_t count, float scale, int64_t element,
              int64_t length, const std::vector<Slice>& slices, Add* add) {
  const void* runs = view.positions.Runs();
  const int64_t stop = start + count;
  if (dtype != DType::kFloat32) {
    return AddEntries(
        runs, start, stop, scale, element, length, slices,
        [&view, dtype](int64_t j) { return ValueAt(view, dtype, j); }, add);
  }
  AddEntries(
      runs, start, stop, scale, element, length, slices,
      [values = view.values](int64_t j) {
        float value;
        std::memcpy(&value, values + j * int64_t{sizeof value}, sizeof value);
        return value;
      },
      add);
}

// A payload, checked, and where the entries of each of its blocks start.
struct Addend {
  PayloadView view;
  std::vector<int64_t> starts;
};

// Adds blocks [begin, end) to what the slices hold, or to zeros.
template <typename Add>
void AddBlocks(const PayloadFormat& format, const std::vector<Addend>& addends, float scale, int64_t begin, int64_t end,
               const std::vector<Slice>& slices, bool from_zeros) {
  Add add;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kBlock;
    const int64_t length = BlockLength(format.n, block);
    if (from_zeros) ClearRange(slices, first, first + length);
    for (const Addend& addend : addends) {
      const auto at = static_cast<size_t>(block);
      AddBlock(addend.view, format.dtype, addend.starts[at], addend.view.positions.counts[at], scale, first, length,
               slices, &add);
    }
  }
  add.Finish();
}

Status Sum(PayloadFormat format, const std::vector<Source>& sources, float scale, const ParallelFor& parallel_for,
           const std::vector<Slice>& slices, bool from_zeros) {
  std::vector<Addend> addends(sources.size());
  int64_t entries = 0;
  for (size_t rank = 0; rank < sources.size(); ++rank) {
    format.k = sources[rank].k;
    Status status = Validate(format, sources[rank].payload, sources[rank].size, &addends[rank].view);
    if (!status.ok()) {
      status.message = "from rank " + std::to_string(rank) + ": " + status.message;
      return status;
    }
    addends[rank].starts = Starts(addends[rank].view);
    entries += addends[rank].view.entries;
  }
  // Zeros were just written; where a payload's entries share lines of the cache, the hardware fetches them ahead.
  const bool near = from_zeros || entries >= format.n / kLine * static_cast<int64_t>(addends.size());
  parallel_for(0, BlockCount(format.n), 4, [&](int64_t begin, int64_t end) {
    const auto add_blocks = near ? AddBlocks<AddAtOnce> : AddBlocks<AddFetched>;
    add_blocks(format, addends, scale, begin, end, slices, from_zeros);
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

Status ReduceLocated(const std::vector<PayloadFormat>& members, int64_t ranks, const uint8_t* gathered, int64_t size,
                     float scale, const ParallelFor& parallel_for, const std::vector<float*>& outs) {
  const auto count = static_cast<size_t>(ranks) * members.size();
  std::vector<int64_t> offsets(count), ks(count);
  HVD_SPARSE_RETURN_IF_ERROR(LocatePayloads(members, ranks, gathered, size, offsets.data(), ks.data()));
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
    HVD_SPARSE_RETURN_IF_ERROR(Sum(format, sources, scale, parallel_for, {{0, format.n, outs[i]}}, true));
  }
  return Status::Ok();
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
