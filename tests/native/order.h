// The order in which a selection takes elements, found by sorting: the oracle of SelectTopK and SelectTopKOfDifference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "random.h"

namespace hvd_sparse {

// All indices: numbers by magnitude and hash, then zeros, then NaN.
inline std::vector<int64_t> TotalOrder(const std::vector<double>& values, uint64_t seed) {
  struct Key {
    int kind;  // a number, a zero, NaN
    double magnitude;
    uint64_t tie;
    int64_t index;
  };
  std::vector<Key> keys;
  for (size_t i = 0; i < values.size(); ++i) {
    const double magnitude = std::fabs(values[i]);
    const int kind = std::isnan(magnitude) ? 2 : magnitude == 0 ? 1 : 0;
    keys.push_back({kind, kind == 0 ? magnitude : 0, kind == 0 ? Hash(seed, i) : i, static_cast<int64_t>(i)});
  }
  std::sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) {
    if (a.kind != b.kind) return a.kind < b.kind;
    return a.magnitude != b.magnitude ? a.magnitude > b.magnitude : a.tie < b.tie;
  });
  std::vector<int64_t> order;
  for (const Key& key : keys) order.push_back(key.index);
  return order;
}

}  // namespace hvd_sparse
