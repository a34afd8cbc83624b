// Counters of fuzz_payload.cc, so that its driver can check that some inputs passed the first checks.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace hvd_sparse {

struct FuzzCounts {
  int64_t formats_refused = 0;
  int64_t accepted = 0;
  int64_t refused = 0;
  int64_t messages_located = 0;
};

FuzzCounts& TheFuzzCounts();

// Large inputs are of more than a block of elements, and take a hundred times as long as others. The upper half of an
// input's first byte is kLarge if it is one.
constexpr uint8_t kLarge = 0x50;
bool IsLarge(const uint8_t* data, size_t size);

}  // namespace hvd_sparse
