// Threads belong to the host framework: it passes its own parallel_for, the core never starts one.
#pragma once

#include <cstdint>
#include <functional>

namespace hvd_sparse {

using RangeFunction = std::function<void(int64_t begin, int64_t end)>;

// Calls `body` on disjoint ranges that cover [begin, end), possibly at the same time; a range has at least
// `grain` elements where there are that many. Results of the core do not depend on how ranges are cut.
using ParallelFor = std::function<void(int64_t begin, int64_t end, int64_t grain, const RangeFunction& body)>;

constexpr int64_t kGrain = int64_t{1} << 18;  // elements of a tensor that are worth a thread

inline void SerialFor(int64_t begin, int64_t end, int64_t /*grain*/, const RangeFunction& body) {
  if (begin < end) body(begin, end);
}

}  // namespace hvd_sparse
