#include "bucket.h"

#include "finite.h"
#include "run_length.h"

namespace hvd_sparse {
namespace {

// The residual at the ascending indices; zero where there is no part.
std::vector<float> ValuesAt(const std::vector<Part>& parts, const std::vector<int64_t>& indices) {
  std::vector<float> values;
  values.reserve(indices.size());
  auto part = parts.begin();
  for (const int64_t index : indices) {
    while (part != parts.end() && part->begin + part->gradient.size <= index) ++part;
    const bool found = part != parts.end() && part->begin <= index;
    values.push_back(found ? part->memory.residual[index - part->begin] : 0.0f);
  }
  return values;
}

// Selects in what the memory holds.
Status SelectKept(const std::vector<Part>& parts, int64_t n, const SelectParams& select,
                  const ParallelFor& parallel_for, bool* finite, Selection* selection) {
  for (const Part& part : parts) *finite++ = AllFinite(part.gradient, parallel_for);
  std::vector<float> copy;
  return SelectTopK({JoinResiduals(parts, n, &copy), n, DType::kFloat32}, select, parallel_for, selection);
}

}  // namespace

Status AccumulateAndPack(const std::vector<Part>& parts, bool active, SelectParams select, const PayloadFormat& format,
                         Centre centre, const ParallelFor& parallel_for, uint8_t* payload, bool* finite,
                         Selection* selection) {
  int64_t size = 0;
  select.k = format.k;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));  // a format that cannot be leaves the memory as it is
  HVD_SPARSE_RETURN_IF_ERROR(active ? AccumulateTopK(parts, format.n, select, parallel_for, finite, selection)
                                    : SelectKept(parts, format.n, select, parallel_for, finite, selection));
  const std::vector<int64_t> indices = std::move(selection->indices);
  std::vector<float> values = ValuesAt(parts, indices);
  if (IsLowBit(format.dtype)) {
    HVD_SPARSE_RETURN_IF_ERROR(
        QuantizeLowBit(values.data(), indices.data(), format.k, format.dtype, centre, format.segments, values.data()));
  }
  const bool is_wide = format.dtype == DType::kFloat64;  // what Pack takes as such
  const std::vector<double> wide(values.begin(), is_wide ? values.end() : values.begin());
  const void* sent = values.data();
  if (is_wide) sent = wide.data();
  return Pack(format, indices.data(), sent, format.k, payload);
}

Status ClearSent(const PayloadFormat& format, const uint8_t* payload, const std::vector<MemorySlice>& slices,
                 float kept) {
  int64_t size = 0;
  PayloadView view;
  HVD_SPARSE_RETURN_IF_ERROR(PayloadSize(format, &size));
  HVD_SPARSE_RETURN_IF_ERROR(Validate(format, payload, size, &view));
  std::vector<int64_t> indices(static_cast<size_t>(view.entries));
  DecodeRunLength(view.positions.counts.data(), view.positions.Runs(), format.n, indices.data());
  auto slice = slices.begin();
  for (int64_t j = 0; j < view.entries; ++j) {
    const int64_t index = indices[static_cast<size_t>(j)];
    while (slice != slices.end() && slice->begin + slice->size <= index) ++slice;
    if (slice == slices.end()) break;
    if (index < slice->begin) continue;
    float* residual = slice->memory.residual + (index - slice->begin);
    const float sent = ValueAt(view, format.dtype, j);
    *residual = format.dtype == DType::kFloat32 ? 0.0f : *residual - sent;
    if (kept != 0) *residual += kept * sent;
    if (slice->memory.velocity != nullptr) slice->memory.velocity[index - slice->begin] = 0.0f;
  }
  return Status::Ok();
}

}  // namespace hvd_sparse
