// Reads the payload format from an op's attributes. TensorFlow itself rejects values that the op does not declare.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../core/bucket_layout.h"
#include "../core/names.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_sparse {

inline constexpr char kCoding[] = "coding: {'run_length', 'elias_fano', 'bitmap', 'dense', 'auto'} = 'run_length'";
inline constexpr char kValueDType[] =
    "value_dtype: {'float32', 'float64', 'float16', 'bfloat16', 'int2', 'int1', 'none'} = 'float32'";

// Source: the kernel construction or the shape inference context, which both have GetAttr.
template <typename Source, typename T, size_t count>
absl::Status GetNamed(Source* source, const char* attribute, const Named<T> (&all)[count], T* value) {
  std::string name;
  TF_RETURN_IF_ERROR(source->GetAttr(attribute, &name));
  const Status status = ParseName(attribute, all, name, value);
  return status.ok() ? absl::OkStatus() : absl::InvalidArgumentError("hvd_sparse: " + status.message);
}

template <typename Source>
absl::Status GetFormat(Source* source, PayloadFormat* format) {
  TF_RETURN_IF_ERROR(GetNamed(source, "coding", kCodingNames, &format->coding));
  return GetNamed(source, "value_dtype", kDTypeNames, &format->dtype);
}

// Reads a bucket's form except for the sizes.
template <typename Source>
absl::Status GetBucketForm(Source* source, bool may_be_joint, BucketForm* form) {
  TF_RETURN_IF_ERROR(GetFormat(source, &form->format));
  TF_RETURN_IF_ERROR(source->GetAttr("channels", &form->channels));
  return may_be_joint ? source->GetAttr("joint", &form->joint) : absl::OkStatus();
}

// Reads the sizes of the tensors that an op returns.
template <typename Source>
absl::Status GetSizes(Source* source, const char* verb, std::vector<int64_t>* ns) {
  TF_RETURN_IF_ERROR(source->GetAttr("ns", ns));
  if (std::all_of(ns->begin(), ns->end(), [](int64_t n) { return n >= 0; })) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("hvd_sparse.", verb, ": ns must be >= 0"));
}

// Reads the shape of the tensor that an op returns.
template <typename Source>
absl::Status GetKnownShape(Source* source, const char* verb, tensorflow::PartialTensorShape* shape) {
  TF_RETURN_IF_ERROR(source->GetAttr("shape", shape));
  if (shape->IsFullyDefined()) return absl::OkStatus();
  const std::string got = shape->DebugString();
  return absl::InvalidArgumentError(absl::StrCat("hvd_sparse.", verb, ": shape must be fully known, got ", got));
}

}  // namespace hvd_sparse
