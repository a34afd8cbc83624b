// Versions of parallel_for that a host framework may have: they run a range whole, divide it into many uneven pieces
// and run them in any order, or run the pieces on threads in parallel.
#pragma once

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "parallel.h"

namespace hvd_sparse {

// Uneven pieces of [begin, end) in shuffled order, some of a single element; about 20 for a long range.
inline std::vector<std::pair<int64_t, int64_t>> UnevenPieces(int64_t begin, int64_t end) {
  std::mt19937_64 random(static_cast<uint64_t>(end - begin));
  std::vector<std::pair<int64_t, int64_t>> pieces;
  const int64_t longest = std::max<int64_t>(3, (end - begin) / 7);
  while (begin < end) {
    const auto drawn = static_cast<int64_t>(random() % static_cast<uint64_t>(longest)) + 1;
    const int64_t size = std::min(end - begin, random() % 4 == 0 ? 1 : drawn);
    pieces.emplace_back(begin, begin + size);
    begin += size;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

inline void ShuffledFor(int64_t begin, int64_t end, int64_t /*grain*/, const RangeFunction& body) {
  for (const auto& [from, to] : UnevenPieces(begin, end)) body(from, to);
}

inline void ThreadedFor(int64_t begin, int64_t end, int64_t /*grain*/, const RangeFunction& body) {
  const auto pieces = UnevenPieces(begin, end);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < pieces.size(); i = next++) body(pieces[i].first, pieces[i].second);
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
}

struct Cut {
  const char* name;
  ParallelFor run;
};

inline const std::vector<Cut>& AllCuts() {
  static const std::vector<Cut> cuts{{"serial", SerialFor}, {"shuffled", ShuffledFor}, {"threaded", ThreadedFor}};
  return cuts;
}

}  // namespace hvd_sparse
