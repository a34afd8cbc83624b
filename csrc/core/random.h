// Counter-based random numbers. They depend only on (seed, index), so every rank and thread computes the same.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace hvd_sparse {

// The finaliser of splitmix64. For a fixed seed it is one-to-one, so it can order equal magnitudes.
HVD_SPARSE_HD inline uint64_t Hash(uint64_t seed, uint64_t index) {
  uint64_t z = seed * 0x9E3779B97F4A7C15ull + index;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace hvd_sparse
