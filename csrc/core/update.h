// What a gradient does to one element of the memory.
#pragma once

#include "dtype.h"
#include "host_device.h"

namespace hvd_sparse {

enum class AccumulateRule {
  kResidual,  // v <- v + g
  kMomentum,  // u <- m*u + g      v <- v + u
  kNesterov,  // u <- m*(u + g)    v <- (v + u) + g
};

HVD_SPARSE_HD inline bool IsFinite(float value) { return MagnitudeBits(value) < 0x7f800000u; }

// The update of one element, which stays as it is where that overflows. Returns whether it did not: an overflow of the
// velocity is one of the residual, too.
template <AccumulateRule rule>
HVD_SPARSE_HD inline bool Update(float gradient, float momentum, float* velocity, float* residual) {
  float u = 0;
  float v = 0;
  if constexpr (rule == AccumulateRule::kResidual) {
    v = *residual + gradient;
  } else if constexpr (rule == AccumulateRule::kMomentum) {
    u = momentum * *velocity + gradient;
    v = *residual + u;
  } else {
    u = momentum * (*velocity + gradient);
    v = (*residual + u) + gradient;
  }
  const bool finite = IsFinite(v);
  *residual = finite ? v : *residual;
  if constexpr (rule != AccumulateRule::kResidual) *velocity = finite ? u : *velocity;
  return finite;
}

// What enters the memory: the gradient as float32 times factor, plus decay * parameter; what is not finite, before or
// after, counts as zero.
template <typename T>
HVD_SPARSE_HD inline float Incoming(T gradient, float factor, float parameter, float decay, bool decays, bool* finite) {
  const float value = ToFloat(gradient);
  *finite &= IsFinite(value);
  float local = (IsFinite(value) ? value : 0.0f) * factor;
  if (decays) local += parameter * decay;
  *finite &= IsFinite(local);
  return IsFinite(local) ? local : 0.0f;
}

}  // namespace hvd_sparse
