#include "mask.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <type_traits>

#include "multiversion.h"
#include "payload_sections.h"

namespace hvd_sparse {
namespace {

HVD_SPARSE_MULTIVERSION int64_t CountBytes(const uint8_t* mask, int64_t n) {  // n <= 255
  uint8_t count = 0;
  for (int64_t i = 0; i < n; ++i) count = static_cast<uint8_t>(count + (mask[i] != 0));
  return count;
}

// The value type that Pack expects: float64 for float64, else float32.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

bool IsScalar(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

Status CheckValues(const PayloadFormat& format, DType dtype, int64_t kept) {
  if (!IsScalar(format.dtype) || format.dtype != dtype) {
    return Status::InvalidArgument(
        "value dtype must be float32, float64, float16 or bfloat16 and that of the values, " +
        std::to_string(static_cast<int>(dtype)) + " on the wire; got " +
        std::to_string(static_cast<int>(format.dtype)));
  }
  if (kept == format.k || (kept == 0 && format.k == 1)) return Status::Ok();
  return Status::InvalidArgument("k must be as many as the mask keeps, " + std::to_string(kept) +
                                 ", or 1 for none; got " + std::to_string(format.k));
}

// Packs the values that a mask selects. places: whether the payload has positions in the matrix, or consecutive ones.
Status PackEntriesOf(const PayloadFormat& format, const Array& values, const uint8_t* mask, bool places,
                     uint8_t* payload) {
  const int64_t kept = CountKept(mask, values.size);
  HVD_SPARSE_RETURN_IF_ERROR(CheckValues(format, values.dtype, kept));
  std::vector<int64_t> indices(static_cast<size_t>(kept));
  return Dispatch(values, [&](const auto* data) {
    using W = Wide<std::decay_t<decltype(*data)>>;
    std::vector<W> wide(static_cast<size_t>(kept));
    size_t at = 0;
    ForEachSet(mask, values.size, [&](int64_t i) {
      indices[at] = i;
      if constexpr (std::is_same_v<W, double>) {
        wide[at++] = data[i];
      } else {
        wide[at++] = ToFloat(data[i]);
      }
    });
    if (!places) std::iota(indices.begin(), indices.end(), 0);
    return Pack(format, indices.data(), wide.data(), kept, payload);
  });
}

// Copies the j-th value of a payload, an item of type W, to values[indices[j]].
template <typename W>
void Scatter(const PayloadView& view, const std::vector<int64_t>& indices, void* values) {
  auto* out = static_cast<W*>(values);
  for (size_t j = 0; j < indices.size(); ++j) std::memcpy(out + indices[j], view.values + j * sizeof(W), sizeof(W));
}

// Writes a payload's values, as they are stored, to values[n], with zeros elsewhere.
void ScatterValues(DType dtype, const PayloadView& view, const std::vector<int64_t>& indices, int64_t n, void* values) {
  std::memset(values, 0, static_cast<size_t>(n * ItemSize(dtype)));
  if (ItemSize(dtype) == 2) {
    Scatter<uint16_t>(view, indices, values);
  } else if (ItemSize(dtype) == 4) {
    Scatter<uint32_t>(view, indices, values);
  } else {
    Scatter<uint64_t>(view, indices, values);
  }
}

Status CheckScalar(DType dtype) {
  if (IsScalar(dtype)) return Status::Ok();
  return Status::InvalidArgument("value dtype must be float32, float64, float16 or bfloat16, got " +
                                 std::to_string(static_cast<int>(dtype)) + " on the wire");
}

}  // namespace

int64_t CountKept(const uint8_t* mask, int64_t n) {
  constexpr int64_t kMost = 248;  // elements whose count fits into a byte, a multiple of the vector size
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kMost) count += CountBytes(mask + i, std::min(kMost, n - i));
  return count;
}

PayloadFormat KeptFormat(int64_t kept, DType dtype) {
  const int64_t n = std::max<int64_t>(1, kept);
  return {n, n, Coding::kDense, dtype, {}};
}

Status PackMasked(const PayloadFormat& format, const Array& values, const uint8_t* mask, uint8_t* payload) {
  if (format.n != values.size) {
    return Status::InvalidArgument("n must be the number of values, " + std::to_string(values.size) + "; got " +
                                   std::to_string(format.n));
  }
  return PackEntriesOf(format, values, mask, true, payload);
}

Status PackMaskedValues(const PayloadFormat& format, const Array& values, const uint8_t* mask, uint8_t* payload) {
  return PackEntriesOf(format, values, mask, false, payload);
}

Status UnpackMasked(const PayloadFormat& format, const uint8_t* payload, int64_t size, void* values, uint8_t* mask) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckScalar(format.dtype));
  PayloadView view;
  std::vector<int64_t> indices;
  HVD_SPARSE_RETURN_IF_ERROR(ValidateIndices(format, payload, size, &view, &indices));
  ScatterValues(format.dtype, view, indices, format.n, values);
  std::memset(mask, 0, static_cast<size_t>(format.n));
  for (const int64_t index : indices) mask[index] = 1;
  return Status::Ok();
}

Status UnpackMaskedValues(DType dtype, const uint8_t* payload, int64_t size, const uint8_t* mask, int64_t n,
                          void* values) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckScalar(dtype));
  const int64_t kept = CountKept(mask, n);
  PayloadView view;
  const PayloadFormat format = KeptFormat(kept, dtype);
  HVD_SPARSE_RETURN_IF_ERROR(CheckBytes(format, payload, size, &view.entries));  // there are no positions to check
  view.values = payload + ValuesAt(format);
  if (view.entries != kept) {
    return Status::CorruptPayload("payload entries is " + std::to_string(view.entries) + ", expected " +
                                  std::to_string(kept) + ", as many as the mask keeps");
  }
  std::vector<int64_t> indices;
  indices.reserve(static_cast<size_t>(kept));
  ForEachSet(mask, n, [&](int64_t i) { indices.push_back(i); });
  ScatterValues(dtype, view, indices, n, values);
  return Status::Ok();
}

}  // namespace hvd_sparse
