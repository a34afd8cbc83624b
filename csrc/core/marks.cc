#include "marks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "byte_mask.h"
#include "candidates.h"
#include "multiversion.h"
#include "run_length.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kBlockWords = kBlock / kMarkBits;
constexpr int64_t kAhead = 24;  // prefetch distance, in entries

void MarkPlaces(const uint16_t* places, uint32_t count, uint64_t* block) {
  for (uint32_t j = 0; j < count; ++j) block[places[j] / kMarkBits] |= uint64_t{1} << (places[j] % kMarkBits);
}

// Checks the places of the last block: it may be shorter than kBlock, which is the range of a place's 16 bits.
Status CheckPlaces(const Changed& update, int64_t n) {
  const int64_t last = BlockCount(n) - 1;
  if (last < 0) return Status::Ok();
  const uint16_t* places = update.places;
  for (int64_t block = 0; block < last; ++block) places += update.counts[block];
  for (uint32_t j = 0; j < update.counts[last]; ++j) {
    if (places[j] >= BlockLength(n, last)) {
      return Status::InvalidArgument("places in the last block must be below " + std::to_string(BlockLength(n, last)) +
                                     ", got " + std::to_string(places[j]));
    }
  }
  return Status::Ok();
}

HVD_SPARSE_MULTIVERSION void CompareWithClock(const uint32_t* clocks, int64_t n, uint32_t after, uint8_t* above) {
  for (int64_t i = 0; i < n; ++i) above[i] = clocks[i] > after;
}

// Packs 64 bytes, each 0 or 1, into 64 bits.
uint64_t BitsOfBytes(const uint8_t* bytes) {
  uint64_t bits = 0;
  for (int j = 0; j < 8; ++j) {
    uint64_t eight;
    std::memcpy(&eight, bytes + 8 * j, sizeof eight);
    bits |= PackEightBytes(eight) << (8 * j);
  }
  return bits;
}

bool IsNan(uint32_t magnitude) { return magnitude > kInfinityBits<float>; }

// The differences whose magnitude reaches a bar; their indices are relative to `Difference::begin`.
struct Reaching {
  std::unique_ptr<float[]> values;
  std::unique_ptr<int64_t[]> indices;
  int64_t count = 0;
  bool has_nan = false;
};

// Gathers the differences that reach the bar. Clears the marks of all others, except those of NaN.
Reaching GatherReaching(const Difference& difference, uint32_t bar, uint64_t* marks) {
  const int64_t first = difference.begin / kMarkBits;
  const auto most = static_cast<size_t>(CountMarks(marks + first, MarkWords(difference.end) - first));
  Reaching found{std::unique_ptr<float[]>(new float[most]), std::unique_ptr<int64_t[]>(new int64_t[most])};
  int64_t count = 0;
  uint32_t largest = 0;
  const auto fetch = [&](int64_t i) {
    __builtin_prefetch(difference.minuend + i);
    __builtin_prefetch(difference.subtrahend + i);
  };
  ForEachMarkedAhead(marks, difference.begin, difference.end, fetch, [&](int64_t i) {
    const float value = difference.minuend[i] - difference.subtrahend[i];
    const uint32_t magnitude = MagnitudeBits(value);
    found.values[count] = value;
    found.indices[count] = i - difference.begin;
    count += Reaches<float>(magnitude, bar);
    largest = std::max(largest, magnitude);
    marks[i / kMarkBits] &= ~(uint64_t{magnitude < bar} << (i % kMarkBits));
  });
  found.count = count;
  found.has_nan = IsNan(largest);
  return found;
}

// Returns the hash of the last tie to be selected; `least` is the k-th largest magnitude.
uint64_t LastTie(const Reaching& reaching, int64_t k, uint32_t least, uint64_t seed) {
  std::vector<uint64_t> ties;
  for (int64_t j = 0; j < reaching.count; ++j) {
    const uint32_t magnitude = MagnitudeBits(reaching.values[j]);
    k -= magnitude > least;
    if (magnitude == least) ties.push_back(Hash(seed, static_cast<uint64_t>(reaching.indices[j])));
  }
  std::nth_element(ties.begin(), ties.begin() + (k - 1), ties.end());
  return ties[static_cast<size_t>(k) - 1];
}

Status CheckIndicesBelow(const int64_t* indices, int64_t count, int64_t n) {
  for (int64_t j = 0; j < count; ++j) {
    if (indices[j] < 0 || indices[j] >= n) {
      return Status::InvalidArgument("indices must be in [0, " + std::to_string(n) + "), got " +
                                     std::to_string(indices[j]));
    }
  }
  return Status::Ok();
}

HVD_SPARSE_MULTIVERSION int64_t Count(const uint64_t* marks, int64_t words) {
  int64_t count = 0;
  for (int64_t w = 0; w < words; ++w) count += __builtin_popcountll(marks[w]);
  return count;
}

}  // namespace

int64_t CountMarks(const uint64_t* marks, int64_t words) { return Count(marks, words); }

Status MarkUpdates(const std::vector<Changed>& updates, int64_t n, uint64_t* marks, int64_t* marked) {
  const int64_t blocks = BlockCount(n);
  for (const Changed& update : updates) HVD_SPARSE_RETURN_IF_ERROR(CheckPlaces(update, n));
  std::vector<const uint16_t*> at;
  for (const Changed& update : updates) at.push_back(update.places);
  *marked = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    uint64_t* words = marks + block * kBlockWords;
    for (size_t u = 0; u < updates.size(); ++u) {
      MarkPlaces(at[u], updates[u].counts[block], words);
      at[u] += updates[u].counts[block];
    }
    *marked += CountMarks(words, MarkWords(BlockLength(n, block)));
  }
  return Status::Ok();
}

Status SetClocks(const Changed& update, int64_t n, uint32_t clock, uint32_t* clocks) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckPlaces(update, n));
  const uint16_t* places = update.places;
  for (int64_t block = 0; block < BlockCount(n); ++block, clocks += kBlock) {
    const uint32_t count = update.counts[block];
    for (uint32_t j = 0; j < count; ++j) {
      if (j + kAhead < count) __builtin_prefetch(clocks + places[j + kAhead], 1);
      clocks[places[j]] = clock;
    }
    places += count;
  }
  return Status::Ok();
}

int64_t MarkChangedAfter(const uint32_t* clocks, int64_t n, uint32_t after, uint64_t* marks) {
  constexpr int64_t kSpan = 4096;
  std::array<uint8_t, kSpan> above{};
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t size = std::min(kSpan, n - begin);
    if (size < kSpan) above.fill(0);
    CompareWithClock(clocks + begin, size, after, above.data());
    for (int64_t i = 0; i < size; i += kMarkBits) marks[(begin + i) / kMarkBits] = BitsOfBytes(above.data() + i);
  }
  return CountMarks(marks, MarkWords(n));
}

Status SelectMarked(const Difference& difference, int64_t k, uint64_t seed, double floor, uint64_t* marks,
                    MarkedSelection* selected) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckCount(k, difference.end - difference.begin));
  HVD_SPARSE_RETURN_IF_ERROR(CheckThreshold(floor));
  Reaching reaching = GatherReaching(difference, CandidateBar<float>(floor), marks);
  selected->has_nan = reaching.has_nan;
  selected->reaching = reaching.count;
  selected->floor = floor;
  uint32_t least = 0;  // the magnitude of the last that is selected
  const auto find = [&](int64_t rank, double* threshold) {
    const Array values{reaching.values.get(), reaching.count, DType::kFloat32};
    return SelectThreshold(values, {rank, ThresholdMethod::kExact, 1.0, seed}, SerialFor, threshold);
  };
  if (reaching.count > 2 * k) HVD_SPARSE_RETURN_IF_ERROR(find(k + k / 2, &selected->floor));
  uint64_t last_tie = 0;
  if (reaching.count > k) {
    double threshold;
    HVD_SPARSE_RETURN_IF_ERROR(find(k, &threshold));
    least = SmallestReaching<float>(threshold);
    last_tie = LastTie(reaching, k, least, seed);
  }
  for (int64_t j = 0; j < reaching.count; ++j) {
    const uint32_t magnitude = MagnitudeBits(reaching.values[j]);
    if (magnitude < least) continue;
    const int64_t index = reaching.indices[j];
    if (magnitude == least && Hash(seed, static_cast<uint64_t>(index)) > last_tie) continue;
    selected->indices.push_back(index);
    selected->values.push_back(reaching.values[j]);
  }
  return Status::Ok();
}

Status AddMarked(const int64_t* indices, const float* values, int64_t count, const float* minuend, double floor,
                 int64_t n, float* subtrahend, uint64_t* marks) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckIndicesBelow(indices, count, n));
  HVD_SPARSE_RETURN_IF_ERROR(CheckThreshold(floor));
  const uint32_t bar = CandidateBar<float>(floor);
  for (int64_t j = 0; j < count; ++j) {
    const int64_t i = indices[j];
    if (j + kAhead < count) {
      __builtin_prefetch(subtrahend + indices[j + kAhead], 1);
      __builtin_prefetch(minuend + indices[j + kAhead]);
    }
    subtrahend[i] += values[j];
    if (MagnitudeBits(minuend[i] - subtrahend[i]) < bar) marks[i / kMarkBits] &= ~(uint64_t{1} << (i % kMarkBits));
  }
  return Status::Ok();
}

}  // namespace hvd_sparse
