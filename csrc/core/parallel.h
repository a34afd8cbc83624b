// The core never starts a thread. The host framework passes its own parallel_for.
#pragma once

#include <cstdint>
#include <functional>

namespace hvd_sparse {

using RangeFunction = std::function<void(int64_t begin, int64_t end)>;

// Calls `body` on disjoint ranges that cover [begin, end), possibly in parallel. `grain`: about the size of a range
// that is worth a thread. Ranges may be smaller. The core's results do not depend on the division into ranges.
using ParallelFor = std::function<void(int64_t begin, int64_t end, int64_t grain, const RangeFunction& body)>;

constexpr int64_t kGrain = int64_t{1} << 18;  // smallest number of elements for which another thread pays off

inline void SerialFor(int64_t begin, int64_t end, int64_t /*grain*/, const RangeFunction& body) {
  if (begin < end) body(begin, end);
}

}  // namespace hvd_sparse
