#include "row_select.h"

#include <limits>
#include <type_traits>

#include "../core/row_key.h"
#include "radix_select.cuh"

namespace hvd_sparse {
namespace {

// The search for the number with a given rank in a row, rank 1 being the smallest, digit by digit. In shared memory.
struct RowSearch {
  unsigned counts[kDigits];  // counts of one digit, among the numbers that share the digits before it
  unsigned rank;             // rank among these numbers; in the end, among equal numbers
  unsigned count;            // how many numbers these are
  uint64_t prefix;
};

// Finds the next digit. All threads of the block must call it.
__device__ void FindRowDigit(RowSearch* search, const Digit& digit) {
  constexpr int kEach = kDigits / kThreads;
  using Scan = cub::BlockScan<unsigned, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  const int first = static_cast<int>(threadIdx.x) * kEach;
  const unsigned rank = search->rank;
  unsigned sum = 0;
  for (int e = 0; e < kEach; ++e) sum += search->counts[first + e];
  unsigned before = 0;
  Scan(storage).ExclusiveSum(sum, before);
  __syncthreads();  // all threads have read the rank
  for (int e = 0; e < kEach; ++e) {
    const unsigned count = search->counts[first + e];
    if (before < rank && rank <= before + count) {
      search->prefix |= static_cast<uint64_t>(first + e) << digit.shift;
      search->rank = rank - before;
      search->count = count;
    }
    before += count;
  }
  __syncthreads();
}

// Searches the numbers of a row, which have `bits` bits. number_of(column, &number) returns whether a column takes
// part, and its number.
template <typename NumberOf>
__device__ void SearchRow(RowSearch* search, int64_t rank, int64_t columns, int bits, const NumberOf& number_of) {
  if (threadIdx.x == 0) search->rank = static_cast<unsigned>(rank), search->prefix = 0;
  for (Digit digit = Highest(bits); digit.bits > 0; digit = Below(digit)) {
    for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += kThreads) search->counts[i] = 0;
    __syncthreads();
    const uint64_t above = digit.Above(search->prefix);
    for (int64_t c = threadIdx.x; c < columns; c += kThreads) {
      uint64_t number;
      if (!number_of(c, &number) || digit.Above(number) != above) continue;
      atomicAdd(&search->counts[digit.Of(number)], 1u);
    }
    __syncthreads();
    FindRowDigit(search, digit);
  }
}

template <typename T>
__device__ void SelectRow(const T* row, int64_t columns, int64_t k, uint64_t seed, uint8_t* mask, double* threshold) {
  __shared__ RowSearch search;
  constexpr BitsOf<T> kFirst = kRowNanKey<T>;  // the largest key has rank 1
  SearchRow(&search, k, columns, 8 * sizeof(T), [&](int64_t c, uint64_t* number) {
    *number = static_cast<uint64_t>(kFirst - RowKey(row[c]));
    return true;
  });
  const auto last = static_cast<BitsOf<T>>(kFirst - search.prefix);
  const unsigned wanted = search.rank;       // how many elements with the last key are selected
  const bool cuts = search.count != wanted;  // whether some of them are not selected
  __syncthreads();
  if (cuts) {
    SearchRow(&search, wanted, columns, 64, [&](int64_t c, uint64_t* number) {
      *number = RowTie<T>(last, seed, c);
      return RowKey(row[c]) == last;
    });
  }
  for (int64_t c = threadIdx.x; c < columns; c += kThreads) {
    const BitsOf<T> found = RowKey(row[c]);
    mask[c] = found > last || (found == last && (!cuts || RowTie<T>(last, seed, c) <= search.prefix));
  }
  if (threadIdx.x == 0) *threshold = MagnitudeOfRowKey<T>(last);
  __syncthreads();  // the next row reuses the shared memory
}

template <typename T>
__global__ void __launch_bounds__(kThreads) select_rows_kernel(const T* data, int64_t rows, int64_t columns, int64_t k,
                                                               uint64_t seed, uint8_t* mask, double* thresholds) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    SelectRow(data + row * columns, columns, k, seed, mask + row * columns, thresholds + row);
  }
}

constexpr int kRowsOfBlock = kThreads / kSumLanes;

// One thread for each lane, so that the additions and their order are the core's.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    laplace_rows_kernel(const T* data, int64_t rows, int64_t columns, double factor, double* thresholds) {
  __shared__ double lanes[kThreads];
  const auto lane = static_cast<int64_t>(threadIdx.x % kSumLanes);
  for (int64_t base = int64_t{blockIdx.x} * kRowsOfBlock; base < rows; base += int64_t{gridDim.x} * kRowsOfBlock) {
    const int64_t row = base + threadIdx.x / kSumLanes;
    double sum = 0;
    for (int64_t c = lane; row < rows && c < columns; c += kSumLanes) sum += FiniteMagnitude(data[row * columns + c]);
    lanes[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0 && row < rows) {
      double total = 0;
      for (int l = 0; l < kSumLanes; ++l) total += lanes[threadIdx.x + static_cast<unsigned>(l)];
      thresholds[row] = total / static_cast<double>(columns) * factor;
    }
    __syncthreads();
  }
}

// The grid's first dimension is over rows, its second over parts of a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) filter_rows_kernel(const T* data, int64_t rows, int64_t columns,
                                                               const double* thresholds, int64_t count, uint8_t* mask) {
  __shared__ BitsOf<T> bar;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    if (threadIdx.x == 0) {
      const BitsOf<T> least = SmallestReaching<T>(thresholds[count == 1 ? 0 : row]);
      bar = least > 0 ? least : BitsOf<T>{1};
    }
    __syncthreads();
    const int64_t start = int64_t{blockIdx.y} * kThreads + threadIdx.x;
    for (int64_t c = start; c < columns; c += int64_t{gridDim.y} * kThreads) {
      mask[row * columns + c] = MagnitudeBits(data[row * columns + c]) >= bar;  // true for NaN, above infinity
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t select_top_k_rows_launch(const Matrix& values, int64_t k, uint64_t seed, uint8_t* mask, double* thresholds,
                                     cudaStream_t stream) {
  if (values.columns > std::numeric_limits<unsigned>::max()) return cudaErrorInvalidValue;
  if (values.rows == 0) return cudaSuccess;
  return Dispatch(values.array(), [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    return Launch(select_rows_kernel<T>, BlocksFor(values.rows, 1), kThreads, stream, data, values.rows, values.columns,
                  k, seed, mask, thresholds);
  });
}

cudaError_t laplace_threshold_rows_launch(const Matrix& values, double factor, double* thresholds,
                                          cudaStream_t stream) {
  if (values.rows == 0) return cudaSuccess;
  return Dispatch(values.array(), [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    return Launch(laplace_rows_kernel<T>, BlocksFor(values.rows, kRowsOfBlock), kThreads, stream, data, values.rows,
                  values.columns, factor, thresholds);
  });
}

cudaError_t filter_threshold_rows_launch(const Matrix& values, const double* thresholds, int64_t count, uint8_t* mask,
                                         cudaStream_t stream) {
  constexpr int64_t kRounds = 8;  // iterations of a block
  if (values.rows == 0) return cudaSuccess;
  const dim3 blocks(BlocksFor(values.rows, 1),
                    std::min<unsigned>(BlocksFor(values.columns, kRounds * kThreads), kLargestGridHeight));
  return Dispatch(values.array(), [&](const auto* data) {
    using T = std::decay_t<decltype(*data)>;
    return Launch(filter_rows_kernel<T>, blocks, kThreads, stream, data, values.rows, values.columns, thresholds, count,
                  mask);
  });
}

}  // namespace hvd_sparse
