#include "accumulate.h"

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>

#include "candidates.h"
#include "multiversion.h"
#include "threshold.h"

namespace hvd_sparse {
namespace {

constexpr int64_t kStage = 2048;  // float32 elements that fit into the first-level cache next to residual and velocity

// Updates [begin, end) element by element. Gradient elements that are not finite count as zero; an element whose update
// overflows does not change. Returns whether any residual reaches the threshold `bar`.
template <AccumulateRule rule>
inline __attribute__((always_inline)) bool UpdateEach(const float* __restrict gradient, int64_t begin, int64_t end,
                                                      float momentum, float* __restrict velocity,
                                                      float* __restrict residual, uint32_t bar, int* bad) {
  bool reached = false;
  for (int64_t i = begin; i < end; ++i) {
    const bool finite = IsFinite(gradient[i]);
    float unused = 0;
    const bool holds = Update<rule>(finite ? gradient[i] : 0.0f, momentum,
                                    rule == AccumulateRule::kResidual ? &unused : velocity + i, residual + i);
    reached |= Reaches<float>(MagnitudeBits(residual[i]), bar);
    *bad |= !finite | !holds;
  }
  return reached;
}

// Returns the new velocity and residual of element i, whether finite or not.
template <AccumulateRule rule>
inline __attribute__((always_inline)) Advanced AdvanceAt(const float* gradient, int64_t i, float momentum,
                                                         const float* velocity, const float* residual) {
  return Advance<rule>(gradient[i], momentum, rule == AccumulateRule::kResidual ? 0.0f : velocity[i], residual[i]);
}

// Does what UpdateEach does, for one chunk, and computes it twice: first only the largest magnitude, as bits. If that
// is finite, so are all gradients, and all elements change: no store has a condition, which would delay the next loads.
template <AccumulateRule rule>
inline __attribute__((always_inline)) bool UpdateChunk(const float* __restrict gradient, int64_t begin, float momentum,
                                                       float* __restrict velocity, float* __restrict residual,
                                                       uint32_t bar, int* bad) {
  const int64_t end = begin + kTested;
  uint32_t most = 0;
  for (int64_t i = begin; i < end; ++i)
    most = std::max(most, MagnitudeBits(AdvanceAt<rule>(gradient, i, momentum, velocity, residual).residual));
  if (most >= kInfinityBits<float>)
    return UpdateEach<rule>(gradient, begin, end, momentum, velocity, residual, bar, bad);
  for (int64_t i = begin; i < end; ++i) {
    const Advanced now = AdvanceAt<rule>(gradient, i, momentum, velocity, residual);
    residual[i] = now.residual;
    if constexpr (rule != AccumulateRule::kResidual) velocity[i] = now.velocity;
  }
  return most >= bar;
}

// Updates chunk after chunk, up to and with the first in which a residual reaches the threshold `bar`. Returns the
// start of this chunk, or n if there is none: the caller looks at the chunk, and goes on after it.
template <AccumulateRule rule>
inline __attribute__((always_inline)) int64_t UpdateUntil(const float* __restrict gradient, int64_t n, float momentum,
                                                          float* __restrict velocity, float* __restrict residual,
                                                          uint32_t bar, int* bad) {
  int64_t i = 0;
  for (; i + kTested <= n; i += kTested) {
    if (UpdateChunk<rule>(gradient, i, momentum, velocity, residual, bar, bad)) return i;
  }
  return UpdateEach<rule>(gradient, i, n, momentum, velocity, residual, bar, bad) ? i : n;
}

HVD_SPARSE_MULTIVERSION int64_t UpdateResidual(const float* gradient, int64_t n, float* residual, uint32_t bar,
                                               int* bad) {
  return UpdateUntil<AccumulateRule::kResidual>(gradient, n, 0, nullptr, residual, bar, bad);
}
HVD_SPARSE_MULTIVERSION int64_t UpdateMomentum(const float* gradient, int64_t n, float momentum, float* velocity,
                                               float* residual, uint32_t bar, int* bad) {
  return UpdateUntil<AccumulateRule::kMomentum>(gradient, n, momentum, velocity, residual, bar, bad);
}
HVD_SPARSE_MULTIVERSION int64_t UpdateNesterov(const float* gradient, int64_t n, float momentum, float* velocity,
                                               float* residual, uint32_t bar, int* bad) {
  return UpdateUntil<AccumulateRule::kNesterov>(gradient, n, momentum, velocity, residual, bar, bad);
}

int64_t UpdateUntilReached(const float* gradient, int64_t n, const AccumulateParams& params, Feedback feedback,
                           uint32_t bar, int* bad) {
  switch (params.rule) {
    case AccumulateRule::kMomentum:
      return UpdateMomentum(gradient, n, params.momentum, feedback.velocity, feedback.residual, bar, bad);
    case AccumulateRule::kNesterov:
      return UpdateNesterov(gradient, n, params.momentum, feedback.velocity, feedback.residual, bar, bad);
    case AccumulateRule::kResidual: break;
  }
  return UpdateResidual(gradient, n, feedback.residual, bar, bad);
}

template <typename T>
inline __attribute__((always_inline)) void StageChunk(const T* gradient, const float* parameter, int64_t n,
                                                      float factor, float weight_decay, float* local, int* bad) {
  int spoilt = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = ToFloat(gradient[i]);
    spoilt |= !IsFinite(value);
    local[i] = (IsFinite(value) ? value : 0.0f) * factor;
  }
  *bad |= spoilt;
  if (parameter == nullptr) return;
  for (int64_t i = 0; i < n; ++i) local[i] += parameter[i] * weight_decay;
}

#define HVD_SPARSE_STAGE(T)                                                                              \
  HVD_SPARSE_MULTIVERSION void Stage(const T* gradient, const float* parameter, int64_t n, float factor, \
                                     float weight_decay, float* local, int* bad) {                       \
    StageChunk(gradient, parameter, n, factor, weight_decay, local, bad);                                \
  }
HVD_SPARSE_STAGE(float)
HVD_SPARSE_STAGE(double)
HVD_SPARSE_STAGE(Float16)
HVD_SPARSE_STAGE(BFloat16)
#undef HVD_SPARSE_STAGE

// Updates [begin, end). If there is a sink, it receives the chunks in which a residual reaches its threshold.
template <typename Sink, typename T>
bool AccumulateRange(const T* gradient, const AccumulateParams& params, int64_t begin, int64_t end, Feedback feedback,
                     Sink* sink) {
  const float* parameter = params.weight_decay != 0 ? params.parameter : nullptr;
  const bool staged = !std::is_same_v<T, float> || params.factor != 1 || parameter != nullptr;
  float stage[kStage];
  int bad = 0;
  for (int64_t i = begin; i < end;) {
    const int64_t size = staged ? std::min(kStage, end - i) : end - i;
    const float* local = stage;
    if constexpr (std::is_same_v<T, float>) local = staged ? stage : gradient + i;
    if (staged) {
      Stage(gradient + i, parameter == nullptr ? nullptr : parameter + i, size, params.factor, params.weight_decay,
            stage, &bad);
    }
    for (int64_t done = 0; done < size;) {
      const int64_t at = i + done;
      float* velocity = feedback.velocity == nullptr ? nullptr : feedback.velocity + at;
      const uint32_t bar = sink == nullptr ? kInfinityBits<float> : sink->threshold();
      done += UpdateUntilReached(local + done, size - done, params, {feedback.residual + at, velocity}, bar, &bad);
      const int64_t stop = std::min(done + kTested, size);
      if (sink != nullptr) sink->Offer(feedback.residual, i + done, i + stop);
      done = stop;
    }
    i += size;
  }
  return bad == 0;
}

// Updates the elements of the parts that lie in [begin, end) of the joined tensors.
void AccumulateSpan(const std::vector<Part>& parts, int64_t begin, int64_t end, std::atomic<bool>* spoilt,
                    Candidates<float>* candidates) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const int64_t first = std::max(begin - part.begin, int64_t{0});
    const int64_t last = std::min(end - part.begin, part.gradient.size);
    if (first >= last) continue;
    candidates->SetBase(part.begin);
    const bool finite = Dispatch(part.gradient, [&](const auto* data) {
      return AccumulateRange(data, part.params, first, last, part.feedback, candidates);
    });
    if (!finite) spoilt[i].store(true);
  }
}

}  // namespace

bool Accumulate(const Array& gradient, const AccumulateParams& params, const ParallelFor& parallel_for,
                Feedback feedback) {
  std::atomic<bool> finite{true};
  Dispatch(gradient, [&](const auto* data) {
    parallel_for(0, gradient.size, kGrain, [&](int64_t begin, int64_t end) {
      if (!AccumulateRange<Passed<float>>(data, params, begin, end, feedback, nullptr)) finite.store(false);
    });
  });
  return finite.load();
}

Status AccumulateFilter(const Array& gradient, const AccumulateParams& params, double threshold,
                        const ParallelFor& parallel_for, Feedback feedback, bool* finite,
                        std::vector<int64_t>* indices) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckThreshold(threshold));
  std::atomic<bool> spoilt{false};
  const Passed<float> none(SmallestReaching<float>(threshold));
  Dispatch(gradient, [&](const auto* data) {
    auto passed = Gather(gradient.size, none, parallel_for, [&](Passed<float>* part, int64_t begin, int64_t end) {
      if (!AccumulateRange(data, params, begin, end, feedback, part)) spoilt.store(true);
    });
    *indices = std::move(passed.indices());
  });
  *finite = !spoilt.load();
  return Status::Ok();
}

Part CutPart(const Part& part, int64_t begin, int64_t end) {
  Part cut = part;
  const int64_t first = std::clamp<int64_t>(begin - part.begin, 0, part.gradient.size);
  const int64_t last = std::clamp<int64_t>(end - part.begin, first, part.gradient.size);
  cut.gradient.data = static_cast<const char*>(part.gradient.data) + first * ItemSize(part.gradient.dtype);
  cut.gradient.size = last - first;
  cut.feedback.residual += first;
  if (cut.feedback.velocity != nullptr) cut.feedback.velocity += first;
  if (cut.params.parameter != nullptr) cut.params.parameter += first;
  cut.begin = part.begin + first - begin;
  return cut;
}

float* ContiguousResiduals(const std::vector<Part>& parts, int64_t n) {
  if (parts.empty()) return nullptr;
  float* first = parts.front().feedback.residual;
  int64_t joined = 0;
  for (const Part& part : parts) {
    if (part.begin != joined || part.feedback.residual != first + joined) return nullptr;
    joined += part.gradient.size;
  }
  return joined == n ? first : nullptr;
}

const float* JoinResiduals(const std::vector<Part>& parts, int64_t n, std::vector<float>* copy) {
  const float* joined = ContiguousResiduals(parts, n);
  if (joined != nullptr) return joined;
  copy->assign(static_cast<size_t>(n), 0.0f);
  for (const Part& part : parts) std::copy_n(part.feedback.residual, part.gradient.size, copy->begin() + part.begin);
  return copy->data();
}

Candidates<float> AccumulateCandidates(const std::vector<Part>& parts, int64_t n, const Candidates<float>& none,
                                       const ParallelFor& parallel_for, bool* finite) {
  std::vector<std::atomic<bool>> spoilt(parts.size());
  auto gathered = Gather(n, none, parallel_for, [&](Candidates<float>* candidates, int64_t begin, int64_t end) {
    AccumulateSpan(parts, begin, end, spoilt.data(), candidates);
  });
  for (size_t i = 0; i < parts.size(); ++i) finite[i] = !spoilt[i].load();
  return gathered;
}

Status AccumulateTopK(const std::vector<Part>& parts, int64_t n, const SelectParams& select,
                      const ParallelFor& parallel_for, bool* finite, Selection* selection) {
  HVD_SPARSE_RETURN_IF_ERROR(CheckCount(select.k, n));
  std::vector<float> copy;
  Array residual{nullptr, n, DType::kFloat32};
  if (!HasHint(select)) {
    for (size_t i = 0; i < parts.size(); ++i) {
      finite[i] = Accumulate(parts[i].gradient, parts[i].params, parallel_for, parts[i].feedback);
    }
    residual.data = JoinResiduals(parts, n, &copy);
    return SelectTopK(residual, select, parallel_for, selection);
  }
  const Candidates<float> none(select.k, CandidateBar<float>(select.threshold_hint), select.seed);
  auto gathered = AccumulateCandidates(parts, n, none, parallel_for, finite);
  const bool is_miss = static_cast<int64_t>(gathered.entries().size()) < select.k;  // a miss reads the data again
  if (is_miss) residual.data = JoinResiduals(parts, n, &copy);
  return SelectTopKAmong(std::move(gathered), residual, select, parallel_for, selection);
}

Status AccumulateTopK(const Array& gradient, const AccumulateParams& params, const SelectParams& select,
                      const ParallelFor& parallel_for, Feedback feedback, bool* finite, Selection* selection) {
  return AccumulateTopK({{gradient, params, feedback, 0}}, gradient.size, select, parallel_for, finite, selection);
}

}  // namespace hvd_sparse
