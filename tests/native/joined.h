// A drawn gradient and error feedback, for each of the rules.
#pragma once

#include <vector>

#include "accumulate.h"
#include "arrays.h"
#include "members.h"

namespace hvd_sparse {

struct Rule {
  const char* name;
  AccumulateParams params;
};

inline const std::vector<Rule> kRules{
    {"residual", {AccumulateRule::kResidual, 1, 0, 0, nullptr}},
    {"momentum, clipped", {AccumulateRule::kMomentum, 0.7f, 0.9f, 0, nullptr}},
    {"nesterov, decay", {AccumulateRule::kNesterov, 1, 0.5f, 1e-2f, nullptr}},
};

// The joined gradients and error feedback of all members, with zeros for missing members.
struct Joined {
  Joined(const Shape& shape, DType dtype, Pattern pattern, const Rule& rule)
      : gradient(Draw(dtype, pattern, shape.n, 1)),
        residual(DrawFloats(shape, 2)),
        velocity(DrawFloats(shape, 3)),
        parameter(DrawFloats(shape, 4)),
        params(rule.params) {
    params.parameter = parameter.data();
    for (int64_t i = 0; i < shape.n; ++i) {
      if (IsMissing(shape, i)) gradient.Set(i, 0);
    }
  }
  Joined(const Joined&) = delete;

  Feedback feedback() {
    return {residual.data(), params.rule == AccumulateRule::kResidual ? nullptr : velocity.data()};
  }
  Array residuals() const { return {residual.data(), static_cast<int64_t>(residual.size()), DType::kFloat32}; }

  Values gradient;
  Floats residual, velocity, parameter;
  AccumulateParams params;
};

}  // namespace hvd_sparse
