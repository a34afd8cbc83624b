// Adds a gradient to the error feedback of one element: velocity u and residual v.
#pragma once

#include "dtype.h"
#include "host_device.h"

namespace hvd_sparse {

enum class AccumulateRule {
  kResidual,  // v <- v + g
  kMomentum,  // u <- m*u + g      v <- v + u
  kNesterov,  // u <- m*(u + g)    v <- (v + u) + g
};  // where |u| is below the smallest normal float32, u <- 0 before it is added

HVD_SPARSE_HD inline bool IsFinite(float value) { return MagnitudeBits(value) < 0x7f800000u; }

// Returns a velocity, or zero if it is denormal. Where gradients are zero for some 800 steps, a velocity decays to a
// denormal, whose product with the momentum rounds to itself: it would stay for ever, and processors take ten times as
// long to multiply it.
HVD_SPARSE_HD inline float WithoutDenormal(float velocity) {
  return MagnitudeBits(velocity) < 0x00800000u ? 0.0f : velocity;
}

struct Advanced {
  float velocity;
  float residual;
};

// Returns one element's new velocity and residual, whether they are finite or not.
template <AccumulateRule rule>
HVD_SPARSE_HD inline Advanced Advance(float gradient, float momentum, float velocity, float residual) {
  if constexpr (rule == AccumulateRule::kResidual) return {velocity, residual + gradient};
  if constexpr (rule == AccumulateRule::kMomentum) {
    const float u = WithoutDenormal(momentum * velocity + gradient);
    return {u, residual + u};
  }
  const float u = WithoutDenormal(momentum * (velocity + gradient));
  return {u, (residual + u) + gradient};
}

// Updates one element, unless the update overflows. Returns false on an overflow. An overflow of the velocity is always
// one of the residual, too.
template <AccumulateRule rule>
HVD_SPARSE_HD inline bool Update(float gradient, float momentum, float* velocity, float* residual) {
  const Advanced now = Advance<rule>(gradient, momentum, *velocity, *residual);
  const bool finite = IsFinite(now.residual);
  *residual = finite ? now.residual : *residual;
  *velocity = finite ? now.velocity : *velocity;
  return finite;
}

// Returns the number to add: the gradient as float32 times factor, plus decay * parameter. A gradient or a result that
// is not finite counts as zero, and sets `finite` to false.
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
