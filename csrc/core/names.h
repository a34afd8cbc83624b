// The names that the adapters' ops take for codings, value types, levels and distributions.
#pragma once

#include <cstddef>
#include <string>

#include "dtype.h"
#include "fit.h"
#include "low_bit.h"
#include "positions.h"
#include "status.h"

namespace hvd_sparse {

template <typename T>
struct Named {
  const char* name;
  T value;
};

inline constexpr Named<Coding> kCodingNames[] = {{"run_length", Coding::kRunLength},
                                                 {"elias_fano", Coding::kEliasFano},
                                                 {"bitmap", Coding::kBitmap},
                                                 {"dense", Coding::kDense},
                                                 {"auto", Coding::kAuto}};
inline constexpr Named<DType> kDTypeNames[] = {{"float32", DType::kFloat32}, {"float64", DType::kFloat64},
                                               {"float16", DType::kFloat16}, {"bfloat16", DType::kBFloat16},
                                               {"int2", DType::kInt2},       {"int1", DType::kInt1},
                                               {"none", DType::kNone}};
inline constexpr Named<Level> kLevelNames[] = {{"mean", Level::kMean}, {"min", Level::kMin}};
inline constexpr Named<Distribution> kDistributionNames[] = {
    {"exponential", Distribution::kExponential}, {"gamma", Distribution::kGamma}, {"pareto", Distribution::kPareto}};

// Finds the value with this name. InvalidArgument lists the names. argument: the name of the parameter, for the error.
template <typename T, size_t count>
Status ParseName(const char* argument, const Named<T> (&all)[count], const std::string& name, T* value) {
  for (const Named<T>& one : all) {
    if (name != one.name) continue;
    *value = one.value;
    return Status::Ok();
  }
  std::string names = all[0].name;
  for (size_t i = 1; i < count; ++i) names += std::string(i + 1 < count ? ", " : " or ") + all[i].name;
  return Status::InvalidArgument(std::string(argument) + " must be " + names + ", got " + name);
}

}  // namespace hvd_sparse
