// Compares the core's decision about bytes with that of wire.h.
#pragma once

#include "expect.h"
#include "payloads.h"

namespace hvd_sparse {

inline std::string Describe(const PayloadFormat& format) {
  return std::string(Name(format.dtype)) + " " + Name(format.coding) + ", n = " + std::to_string(format.n) +
         ", k = " + std::to_string(format.k) + ", " + std::to_string(format.segments.size()) + " segments";
}

// Returns whether `view` has these entries and unpacks to them, in heap arrays of exact size.
inline void CheckEntries(const PayloadFormat& format, const PayloadView& view, const std::vector<int64_t>& indices,
                         const std::vector<uint64_t>& values, const std::string& where) {
  EXPECT_EQ(static_cast<int64_t>(indices.size()), view.entries, where);
  if (static_cast<int64_t>(indices.size()) != view.entries) return;
  const size_t width = format.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  const std::unique_ptr<int64_t[]> unpacked(new int64_t[indices.size()]);
  const std::unique_ptr<uint8_t[]> wide(new uint8_t[indices.size() * width]);
  Unpack(format, view, unpacked.get(), wide.get());
  EXPECT(std::equal(indices.begin(), indices.end(), unpacked.get()), "the indices; " << where);
  for (size_t j = 0; j < values.size(); ++j) {
    const double expected = Decode(format.dtype, values[j]);
    double full = 0;
    float single = 0;
    std::memcpy(format.dtype == DType::kFloat64 ? static_cast<void*>(&full) : &single, &wide[j * width], width);
    const double received = format.dtype == DType::kFloat64 ? full : static_cast<double>(single);
    EXPECT(SameNumber(expected, received),
           "value " << j << " is " << received << ", not " << expected << "; " << where);
    const float at = ValueAt(view, format.dtype, static_cast<int64_t>(j));
    EXPECT(SameNumber(static_cast<float>(expected), at), "ValueAt " << j << " is " << at << "; " << where);
  }
}

// Validate must accept a heap copy of exact size if and only if ParsePayload does. Returns whether it was accepted.
inline bool CheckVerdict(const PayloadFormat& format, const Bytes& bytes, const std::string& where) {
  std::vector<int64_t> indices;
  std::vector<uint64_t> values;
  const bool good = ParsePayload(format, bytes, &indices, &values);
  const Exact copy(bytes);
  PayloadView view;
  const Status status = Validate(format, copy.get(), static_cast<int64_t>(bytes.size()), &view);
  EXPECT_STATUS(good ? StatusKind::kOk : StatusKind::kCorruptPayload, status, where);
  if (good && status.ok()) CheckEntries(format, view, indices, values, where);
  return status.ok();
}

}  // namespace hvd_sparse
