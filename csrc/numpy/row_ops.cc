// Payloads of masked matrices, as plain C functions on pointers, for `hvd_sparse.native_rows`.
// The caller checks the sizes and types of arrays, as in ops.cc.
#include "../core/mask.h"
#include "../core/row_select.h"
#include "report.h"

using hvd_sparse::Guarded;

// `hvd_sparse.native_rows` defines a structure with the same layout; see HvdSparseForm.
struct HvdSparseMatrix {
  const void* data;
  int64_t rows;
  int64_t columns;
  int32_t dtype;
};
static_assert(sizeof(HvdSparseMatrix) == 32 && offsetof(HvdSparseMatrix, dtype) == 24);

namespace {

hvd_sparse::Matrix MatrixOf(const HvdSparseMatrix& values) {
  return {values.data, values.rows, values.columns, static_cast<hvd_sparse::DType>(values.dtype)};
}

}  // namespace

HVD_SPARSE_API int hvd_sparse_count_kept(const uint8_t* mask, int64_t n, int64_t* kept, char* message) {
  return Guarded(message, [&] {
    *kept = hvd_sparse::CountKept(mask, n);
    return hvd_sparse::Status::Ok();
  });
}

// payload: `hvd_sparse.wire.payload_size` bytes for this form.
HVD_SPARSE_API int hvd_sparse_pack_rows(const HvdSparseForm* form, const HvdSparseMatrix* values, const uint8_t* mask,
                                        uint8_t* payload, char* message) {
  return Guarded(message, [&] {
    return hvd_sparse::PackMasked(hvd_sparse::FormatOf(*form), MatrixOf(*values).array(), mask, payload);
  });
}

HVD_SPARSE_API int hvd_sparse_pack_kept(const HvdSparseForm* form, const HvdSparseMatrix* values, const uint8_t* mask,
                                        uint8_t* payload, char* message) {
  return Guarded(message, [&] {
    return hvd_sparse::PackMaskedValues(hvd_sparse::FormatOf(*form), MatrixOf(*values).array(), mask, payload);
  });
}

// values and mask: form->n elements.
HVD_SPARSE_API int hvd_sparse_unpack_rows(const HvdSparseForm* form, const uint8_t* payload, int64_t size, void* values,
                                          uint8_t* mask, char* message) {
  return Guarded(message,
                 [&] { return hvd_sparse::UnpackMasked(hvd_sparse::FormatOf(*form), payload, size, values, mask); });
}

// mask and values: n elements.
HVD_SPARSE_API int hvd_sparse_unpack_kept(int32_t dtype, const uint8_t* payload, int64_t size, const uint8_t* mask,
                                          int64_t n, void* values, char* message) {
  return Guarded(message, [&] {
    return hvd_sparse::UnpackMaskedValues(static_cast<hvd_sparse::DType>(dtype), payload, size, mask, n, values);
  });
}
