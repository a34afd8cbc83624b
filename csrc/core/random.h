// Counter-based random numbers: a pure function of (seed, index), the same on every rank and thread.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace hvd_sparse {

// The finaliser of splitmix64; one-to-one for a fixed seed, so that it also orders equal magnitudes.
HVD_SPARSE_HD inline uint64_t Hash(uint64_t seed, uint64_t index) {
  uint64_t z = seed * 0x9E3779B97F4A7C15ull + index;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace hvd_sparse
