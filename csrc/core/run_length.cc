#include "run_length.h"

#include <algorithm>
#include <string>

namespace hvd_sparse {

namespace {

Status NotAscending(int64_t n, int64_t index, int64_t previous) {
  return Status::InvalidArgument("indices must be strictly ascending in [0, " + std::to_string(n) + "), got " +
                                 std::to_string(index) + " after " + std::to_string(previous));
}

}  // namespace

Status CheckAscending(const int64_t* indices, int64_t k, int64_t n) {
  int64_t previous = -1;
  for (int64_t j = 0; j < k; ++j) {
    if (indices[j] <= previous || indices[j] >= n) return NotAscending(n, indices[j], previous);
    previous = indices[j];
  }
  return Status::Ok();
}

Status EncodeRunLength(const int64_t* indices, int64_t k, int64_t n, uint32_t* counts, uint16_t* runs) {
  std::fill(counts, counts + BlockCount(n), 0u);
  int64_t previous = -1;
  for (int64_t j = 0; j < k; ++j) {
    const int64_t index = indices[j];
    if (index <= previous || index >= n) return NotAscending(n, index, previous);
    const int64_t block = index / kBlock;
    runs[j] = static_cast<uint16_t>(index - std::max(previous + 1, block * kBlock));
    ++counts[block];
    previous = index;
  }
  return Status::Ok();
}

Status ValidateRunLength(const uint32_t* counts, const void* runs, int64_t k, int64_t n) {
  int64_t j = 0;
  for (int64_t block = 0; block < BlockCount(n); ++block) {
    const int64_t length = BlockLength(n, block);
    const int64_t count = counts[block];
    if (count > length || count > k - j) {
      return Status::CorruptPayload("block " + std::to_string(block) + " of " + std::to_string(length) +
                                    " elements counts " + std::to_string(count) + " entries");
    }
    uint32_t zeros = 0;  // at most 65,536 runs, each below that
    for (const int64_t end = j + count; j < end; ++j) zeros += RunAt(runs, j);
    if (count + zeros > length) {  // each entry takes one element plus its run of zeros
      return Status::CorruptPayload("a run of zeros leaves block " + std::to_string(block));
    }
  }
  if (j != k) {
    return Status::CorruptPayload("block counts sum to " + std::to_string(j) + ", not to the " + std::to_string(k) +
                                  " entries");
  }
  return Status::Ok();
}

void DecodeRunLength(const uint32_t* counts, const void* runs, int64_t n, int64_t* indices) {
  int64_t entry = 0;
  for (int64_t block = 0; block < BlockCount(n); ++block) {
    int64_t position = block * kBlock;
    for (const int64_t end = entry + counts[block]; entry < end; ++entry) {
      position += RunAt(runs, entry);
      *indices++ = position++;
    }
  }
}

}  // namespace hvd_sparse
