#include "merge.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "dtype.h"
#include "run_length.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kWord = 64;
constexpr int64_t kWindow = 1 << 15;  // elements added at a time, so that their sums fit into a cache

// The entries [at, end) of a list, which have not been added yet.
struct Rest {
  int64_t at;
  int64_t end;
};

}  // namespace

Status MergeEntries(const EntryLists& lists, int64_t* indices, float* sums, int64_t* found) {
  std::vector<Rest> rests;
  int64_t end = 0;
  for (int64_t list = 0; list < lists.count; ++list) {
    rests.push_back({end, end + lists.counts[list]});
    HVD_SPARSE_RETURN_IF_ERROR(CheckAscending(lists.indices + end, lists.counts[list], kMaxElements));
    end = rests.back().end;
  }
  std::vector<float> window(kWindow, 0.0f);
  std::array<uint64_t, kWindow / kWord> present{};
  *found = 0;
  while (true) {
    int64_t next = std::numeric_limits<int64_t>::max();
    for (const Rest& rest : rests) {
      if (rest.at < rest.end) next = std::min(next, lists.indices[rest.at]);
    }
    if (next == std::numeric_limits<int64_t>::max()) return Status::Ok();
    const int64_t begin = next / kWindow * kWindow;
    for (Rest& rest : rests) {
      for (; rest.at < rest.end && lists.indices[rest.at] - begin < kWindow; ++rest.at) {
        const auto place = static_cast<size_t>(lists.indices[rest.at] - begin);
        window[place] += lists.values[rest.at];
        present[place / kWord] |= uint64_t{1} << (place % kWord);
      }
    }
    for (size_t word = 0; word < present.size(); ++word) {
      for (uint64_t bits = present[word]; bits != 0; bits &= bits - 1) {
        const size_t place = word * kWord + static_cast<size_t>(__builtin_ctzll(bits));
        sums[*found] = window[place];
        indices[(*found)++] = begin + static_cast<int64_t>(place);
        window[place] = 0.0f;
      }
      present[word] = 0;
    }
  }
}

void FindCommon(const int64_t* indices, int64_t count, const int64_t* others, int64_t others_count, bool* common) {
  int64_t other = 0;
  for (int64_t i = 0; i < count; ++i) {
    while (other < others_count && others[other] < indices[i]) ++other;
    common[i] = other < others_count && others[other] == indices[i];
  }
}

}  // namespace hvd_sparse
