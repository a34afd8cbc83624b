// CPU kernels of the TensorFlow ops. They check tensors, call the core, and report errors. They do not depend on
// Python, Horovod or MPI.
#include <string>
#include <vector>

#include "../core/finite.h"
#include "../core/low_bit.h"
#include "../core/payload.h"
#include "../core/quantize.h"
#include "../core/reduce.h"
#include "../core/select.h"
#include "kernel.h"

namespace hvd_sparse {
namespace {

class SelectTopKKernel : public Kernel {
 public:
  explicit SelectTopKKernel(OpKernelConstruction* construction) : Kernel(construction, "select_top_k") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Array values;
    SelectParams params;
    TF_RETURN_IF_ERROR(call.Values(&values));
    TF_RETURN_IF_ERROR(call.Number("k", &params.k));
    TF_RETURN_IF_ERROR(call.Seed(&params.seed));
    TF_RETURN_IF_ERROR(call.Number("threshold_hint", &params.threshold_hint));
    Selection selection;
    TF_RETURN_IF_ERROR(call.Report(SelectTopK(values, params, call.Pool(), &selection)));
    return call.OutputSelection(values, selection);
  }
};

class AllFiniteKernel : public Kernel {
 public:
  explicit AllFiniteKernel(OpKernelConstruction* construction) : Kernel(construction, "all_finite") {}

 protected:
  absl::Status Run(const Call& call) const override {
    Array values;
    TF_RETURN_IF_ERROR(call.Values(&values));
    return call.OutputScalar("finite", AllFinite(values, call.Pool()));
  }
};

class PackKernel : public FormatKernel {
 public:
  explicit PackKernel(OpKernelConstruction* construction) : FormatKernel(construction, "pack") {}

 protected:
  absl::Status Run(const Call& call) const override {
    PayloadFormat format;
    int64_t size = 0, entries = 0, count = 0;
    const int64_t* indices = nullptr;
    const void* values = nullptr;
    uint8_t* payload = nullptr;
    TF_RETURN_IF_ERROR(Format(call, &format, &size));
    TF_RETURN_IF_ERROR(CheckValueType(call, call.context()->input_dtype(1)));
    TF_RETURN_IF_ERROR(call.Vector("indices", &indices, &entries));
    TF_RETURN_IF_ERROR(call.Vector("values", &values, &count));
    if (entries != count) return call.Invalid(entries, " indices but ", count, " values");
    TF_RETURN_IF_ERROR(call.Output("payload", {size}, &payload));
    return call.Report(Pack(format, indices, values, entries, payload));
  }
};

class UnpackKernel : public FormatKernel {
 public:
  explicit UnpackKernel(OpKernelConstruction* construction) : FormatKernel(construction, "unpack") {}

 protected:
  absl::Status Run(const Call& call) const override {
    PayloadFormat format;
    int64_t expected = 0, size = 0;
    const uint8_t* payload = nullptr;
    int64_t* indices = nullptr;
    void* values = nullptr;
    TF_RETURN_IF_ERROR(Format(call, &format, &expected));
    TF_RETURN_IF_ERROR(CheckValueType(call, call.context()->expected_output_dtype(1)));
    TF_RETURN_IF_ERROR(call.Vector("payload", &payload, &size));
    PayloadView view;
    TF_RETURN_IF_ERROR(call.Report(Validate(format, payload, size, &view)));
    TF_RETURN_IF_ERROR(call.Output("indices", {view.entries}, &indices));
    TF_RETURN_IF_ERROR(call.Output("values", {view.entries}, &values));
    Unpack(format, view, indices, values);
    return absl::OkStatus();
  }
};

class ReducePayloadsKernel : public FormatKernel {
 public:
  explicit ReducePayloadsKernel(OpKernelConstruction* construction) : FormatKernel(construction, "reduce_payloads") {}

 protected:
  absl::Status Run(const Call& call) const override {
    PayloadFormat format;
    int64_t size = 0, offset = 0;
    float scale = 0;
    float* sum = nullptr;
    TF_RETURN_IF_ERROR(Format(call, &format, &size));
    TF_RETURN_IF_ERROR(call.Number("offset", &offset));
    TF_RETURN_IF_ERROR(call.Number("scale", &scale));
    const Tensor& gathered = call.context()->input(0);
    if (gathered.dims() != 2 || offset < 0 || size > gathered.dim_size(1) - offset) {
      return call.Invalid("gathered must be [ranks, bytes] with ", size, " bytes at offset ", offset, ", got ",
                          gathered.shape().DebugString());
    }
    TF_RETURN_IF_ERROR(call.Report(CheckRanks(gathered.dim_size(0))));
    TF_RETURN_IF_ERROR(call.Output("sum", {format.n}, &sum));
    const auto* first = static_cast<const uint8_t*>(gathered.data()) + offset;
    return call.Report(
        ReducePayloads(format, first, gathered.dim_size(0), gathered.dim_size(1), scale, call.Pool(), sum));
  }
};

class LocatePayloadsKernel : public Kernel {
 public:
  explicit LocatePayloadsKernel(OpKernelConstruction* construction) : Kernel(construction, "locate_payloads") {
    BucketForm form;
    OP_REQUIRES_OK(construction, GetBucketForm(construction, false, &form));
    OP_REQUIRES_OK(construction, GetSizes(construction, "locate_payloads", &form.sizes));
    const Status status = MemberFormats(form, &members_);
    OP_REQUIRES(construction, status.ok(),
                absl::InvalidArgumentError(absl::StrCat("hvd_sparse.locate_payloads: ", status.message)));
  }

 protected:
  absl::Status Run(const Call& call) const override {
    const uint8_t* gathered = nullptr;
    int64_t size = 0, ranks = 0;
    int64_t* places = nullptr;
    TF_RETURN_IF_ERROR(call.Vector("gathered", &gathered, &size));
    TF_RETURN_IF_ERROR(call.Number("ranks", &ranks));
    TF_RETURN_IF_ERROR(call.Report(CheckRanks(ranks)));
    const auto members = static_cast<int64_t>(members_.size());
    TF_RETURN_IF_ERROR(call.Output("places", {2, ranks, members}, &places));
    return call.Report(LocatePayloads(members_, ranks, gathered, size, places, places + ranks * members));
  }

 private:
  std::vector<PayloadFormat> members_;
};

class QuantizeKernel : public Kernel {
 public:
  explicit QuantizeKernel(OpKernelConstruction* construction) : Kernel(construction, "quantize") {
    OP_REQUIRES_OK(construction, GetNamed(construction, "level", kLevelNames, &level_));
    OP_REQUIRES_OK(construction, GetNamed(construction, "value_dtype", kDTypeNames, &dtype_));
  }

 protected:
  absl::Status Run(const Call& call) const override {
    const Tensor& values = call.context()->input(0);
    const int64_t* indices = nullptr;
    int64_t count = 0;
    Segments segments;
    float* quantized = nullptr;
    TF_RETURN_IF_ERROR(call.Vector("indices", &indices, &count));
    TF_RETURN_IF_ERROR(call.GetSegments(&segments));
    TF_RETURN_IF_ERROR(call.Output("quantized", values.shape(), &quantized));
    const auto* from = static_cast<const float*>(values.data());
    const int64_t n = values.NumElements();
    if (!segments.empty() && count != n) return call.Invalid(count, " indices but ", n, " values, and segments");
    if (IsLowBit(dtype_)) {
      return call.Report(QuantizeLowBit(from, indices, n, dtype_, level_, segments, quantized));
    }
    Quantize(from, n, dtype_, quantized);
    return absl::OkStatus();
  }

 private:
  DType dtype_ = DType::kFloat32;
  Level level_ = Level::kMean;
};

class TokenKernel : public Kernel {
 public:
  explicit TokenKernel(OpKernelConstruction* construction) : Kernel(construction, "token") {}

 protected:
  absl::Status Run(const Call& call) const override {
    int64_t rank = 0;
    float* token = nullptr;
    TF_RETURN_IF_ERROR(call.Number("rank", &rank));
    TF_RETURN_IF_ERROR(call.Output("token", {2}, &token));
    token[0] = 1;
    token[1] = static_cast<float>(rank + 1);
    return absl::OkStatus();
  }
};

HVD_SPARSE_REGISTER(SelectTopK);
HVD_SPARSE_REGISTER(AllFinite);
HVD_SPARSE_REGISTER(Pack);
HVD_SPARSE_REGISTER(Unpack);
HVD_SPARSE_REGISTER(ReducePayloads);
HVD_SPARSE_REGISTER(LocatePayloads);
HVD_SPARSE_REGISTER(Quantize);
HVD_SPARSE_REGISTER(Token);

}  // namespace
}  // namespace hvd_sparse
