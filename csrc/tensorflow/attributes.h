// Reads the payload format from an op's attributes. TensorFlow itself rejects values that the op does not declare.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../core/bucket_layout.h"
#include "absl/strings/str_cat.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_sparse {

inline constexpr char kCoding[] = "coding: {'run_length', 'elias_fano', 'bitmap', 'dense', 'auto'} = 'run_length'";
inline constexpr char kValueDType[] =
    "value_dtype: {'float32', 'float64', 'float16', 'bfloat16', 'int2', 'int1', 'none'} = 'float32'";

inline DType ParseDType(const std::string& name) {
  if (name == "float64") return DType::kFloat64;
  if (name == "float16") return DType::kFloat16;
  if (name == "none") return DType::kNone;
  if (name == "int2") return DType::kInt2;
  if (name == "int1") return DType::kInt1;
  return name == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
}

inline Coding ParseCoding(const std::string& name) {
  if (name == "elias_fano") return Coding::kEliasFano;
  if (name == "bitmap") return Coding::kBitmap;
  if (name == "dense") return Coding::kDense;
  return name == "auto" ? Coding::kAuto : Coding::kRunLength;
}

// Source: the kernel construction or the shape inference context, which both have GetAttr.
template <typename Source>
absl::Status GetFormat(Source* source, PayloadFormat* format) {
  std::string coding, value_dtype;
  TF_RETURN_IF_ERROR(source->GetAttr("coding", &coding));
  TF_RETURN_IF_ERROR(source->GetAttr("value_dtype", &value_dtype));
  format->coding = ParseCoding(coding);
  format->dtype = ParseDType(value_dtype);
  return absl::OkStatus();
}

// Reads a bucket's form except for the sizes.
template <typename Source>
absl::Status GetBucketForm(Source* source, bool may_be_joint, BucketForm* form) {
  TF_RETURN_IF_ERROR(GetFormat(source, &form->format));
  TF_RETURN_IF_ERROR(source->GetAttr("channels", &form->channels));
  return may_be_joint ? source->GetAttr("joint", &form->joint) : absl::OkStatus();
}

template <typename Source>
absl::Status GetLevel(Source* source, Level* level) {
  std::string name;
  TF_RETURN_IF_ERROR(source->GetAttr("level", &name));
  *level = name == "min" ? Level::kMin : Level::kMean;
  return absl::OkStatus();
}

// Reads the sizes of the tensors that an op returns.
template <typename Source>
absl::Status GetSizes(Source* source, const char* verb, std::vector<int64_t>* ns) {
  TF_RETURN_IF_ERROR(source->GetAttr("ns", ns));
  if (std::all_of(ns->begin(), ns->end(), [](int64_t n) { return n >= 0; })) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("hvd_sparse.", verb, ": ns must be >= 0"));
}

}  // namespace hvd_sparse
