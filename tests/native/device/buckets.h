// Compares a bucket on a device, run on the host, with the core's: error feedback, payloads, clearing, sums.
#pragma once

#include "../../../csrc/cuda/bucket.h"
#include "../../../csrc/cuda/reduce.h"
#include "../members.h"
#include "arrays.h"
#include "bucket.h"
#include "reduce.h"

namespace hvd_sparse {

// The shapes of a bucket's tensors, and the format of each payload.
struct Setting {
  std::vector<const Shape*> shapes;
  Coding coding = Coding::kRunLength;
  DType dtype = DType::kFloat32;
  AccumulateRule rule = AccumulateRule::kMomentum;
  double hint = 2.0;
  bool contiguous = true;
  bool active = true;
  Kind kind = Kind::kNormal;
  Segments segments = {};
  Level level = Level::kMean;
};

struct Tensors {
  Tensors(const Shape& shape, bool contiguous, uint64_t seed)
      : residual(shape, DrawFloats(shape, seed), contiguous),
        velocity(shape, DrawFloats(shape, seed + 1), contiguous) {}
  Members residual, velocity;
};

// One side of the comparison: error feedback and message.
struct Side {
  explicit Side(const Setting& setting) {
    for (size_t s = 0; s < setting.shapes.size(); ++s) {
      tensors.push_back(std::make_unique<Tensors>(*setting.shapes[s], setting.contiguous, 10 * s));
    }
  }

  Feedback FeedbackOf(const Setting& setting, size_t s, size_t i) {
    const bool moves = setting.rule != AccumulateRule::kResidual;
    return {tensors[s]->residual.data(i), moves ? tensors[s]->velocity.data(i) : nullptr};
  }

  std::vector<std::unique_ptr<Tensors>> tensors;
};

inline std::string NameOf(const Setting& setting) {
  std::string name;
  for (const Shape* shape : setting.shapes) name += std::string(shape->name) + ", ";
  return name + "coding " + std::to_string(static_cast<int>(setting.coding)) + ", type " +
         std::to_string(static_cast<int>(setting.dtype)) + ", rule " + std::to_string(static_cast<int>(setting.rule)) +
         ", hint " + std::to_string(setting.hint) + (setting.contiguous ? "" : ", apart") +
         (setting.active ? "" : ", idle");
}

// The gradients of a bucket: those of odd numbers in bfloat16, and not aligned.
struct Gradients {
  Gradients(const Setting& setting, uint64_t seed) {
    for (const Shape* shape : setting.shapes) {
      for (const auto& [begin, size] : shape->members) {
        wide.push_back(DrawValues<float>(setting.kind, size, seed + wide.size()));
        narrow.push_back(DrawValues<BFloat16>(setting.kind, size + 1, seed + wide.size()));
      }
    }
  }
  Array at(size_t i) const {
    const auto size = static_cast<int64_t>(wide[i].size());
    if (i % 2 == 0) return {wide[i].data(), size, DType::kFloat32};
    return {narrow[i].data() + 1, size, DType::kBFloat16};
  }

  std::vector<std::vector<float>> wide;
  std::vector<std::vector<BFloat16>> narrow;
};

inline PayloadFormat FormatOf(const Setting& setting, size_t s) {
  const int64_t n = setting.shapes[s]->n;
  return {n, setting.coding == Coding::kDense ? n : 20 + 7 * static_cast<int64_t>(s), setting.coding, setting.dtype,
          setting.segments};
}

inline std::vector<Part> PartsOf(const Setting& setting, const Gradients& gradients, Side& side, size_t s,
                                 size_t* member) {
  std::vector<Part> parts;
  for (const auto& [begin, size] : setting.shapes[s]->members) {
    AccumulateParams params{setting.rule, 0.75f, 0.9f, 0.0f, nullptr};
    if (*member % 3 == 1) {
      params.weight_decay = 0.01f;
      params.parameter = gradients.wide[*member].data();
    }
    parts.push_back({gradients.at(*member), params, side.FeedbackOf(setting, s, parts.size()), begin});
    ++*member;
  }
  return parts;
}

using Words = std::vector<uint64_t>;
inline uint8_t* BytesOf(Words& words) { return reinterpret_cast<uint8_t*>(words.data()); }

// The results for a bucket.
struct Outcome {
  std::vector<Words> payloads;
  std::vector<double> info;
  std::unique_ptr<bool[]> finite;
};

inline Outcome RunCore(const Setting& setting, const Gradients& gradients, Side& side) {
  Outcome out;
  out.finite = std::make_unique<bool[]>(gradients.wide.size());
  size_t member = 0;
  for (size_t s = 0; s < setting.shapes.size(); ++s) {
    const PayloadFormat format = FormatOf(setting, s);
    const size_t first = member;
    const std::vector<Part> parts = PartsOf(setting, gradients, side, s, &member);
    int64_t size = 0;
    Selection selection;
    EXPECT_STATUS(StatusKind::kOk, PayloadSize(format, &size), "size");
    out.payloads.emplace_back(static_cast<size_t>(size / 8));
    EXPECT_STATUS(StatusKind::kOk,
                  AccumulateAndPack(parts, setting.active, {format.k, setting.hint, 5}, format, setting.level,
                                    SerialFor, BytesOf(out.payloads.back()), out.finite.get() + first, &selection),
                  NameOf(setting));
    out.info.push_back(selection.threshold);
  }
  return out;
}

// hints: on the device, one for each selection; null: the setting's hint.
inline Outcome RunKernels(const Setting& setting, const Gradients& gradients, Side& side, Hint* hints = nullptr) {
  Outcome out;
  BucketSelections selections;
  size_t member = 0;
  for (size_t s = 0; s < setting.shapes.size(); ++s) {
    const PayloadFormat format = FormatOf(setting, s);
    BucketSelection selection{{},
                              PartsOf(setting, gradients, side, s, &member),
                              {format.k, setting.hint, 5},
                              hints == nullptr ? nullptr : hints + s,
                              nullptr};
    EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &selection.plan), "plan");
    out.payloads.emplace_back(static_cast<size_t>(selection.plan.size / 8), ~uint64_t{0});
    selection.payload = BytesOf(out.payloads.back());
    selections.push_back(selection);
  }
  out.info.resize(2 * selections.size());
  out.finite = std::make_unique<bool[]>(member + 1);
  int64_t size = 0;
  EXPECT_EQ(cudaSuccess, accumulate_bucket_workspace_size(selections, &size), "size");
  Scratch workspace(size);
  EXPECT_EQ(cudaSuccess,
            accumulate_bucket_launch(selections, setting.active, setting.level, out.info.data(), out.finite.get(),
                                     workspace.data(), nullptr),
            NameOf(setting));
  return out;
}

inline void ExpectSameFeedback(const Setting& setting, Side& expected, Side& found) {
  for (size_t s = 0; s < setting.shapes.size(); ++s) {
    for (size_t i = 0; i < setting.shapes[s]->members.size(); ++i) {
      const auto size = static_cast<size_t>(setting.shapes[s]->members[i].second);
      const auto same = [&](Members& a, Members& b) {
        return SameFloats({a.data(i), a.data(i) + size}, {b.data(i), b.data(i) + size});
      };
      EXPECT(same(expected.tensors[s]->residual, found.tensors[s]->residual), NameOf(setting) << ", residual " << i);
      EXPECT(same(expected.tensors[s]->velocity, found.tensors[s]->velocity), NameOf(setting) << ", velocity " << i);
    }
  }
}

// Clears each rank's sent values from its error feedback, and computes the sum of two ranks.
inline void CheckWayBack(const Setting& setting, Outcome& sent, float kept, Side& expected, Side& found) {
  ReduceSelections cleared, summed;
  std::vector<Words> gathered;
  std::vector<std::vector<Floats>> sums, expected_sums;
  for (size_t s = 0; s < setting.shapes.size(); ++s) {
    const PayloadFormat format = FormatOf(setting, s);
    PayloadPlan plan{};
    EXPECT_STATUS(StatusKind::kOk, MakePlan(format, &plan), "plan");
    std::vector<FeedbackSlice> own, kernels;
    std::vector<Slice> outs;
    std::vector<FeedbackSlice> kernel_outs;
    expected_sums.emplace_back();
    sums.emplace_back();
    for (const auto& [begin, size] : setting.shapes[s]->members) {
      own.push_back({begin, size, expected.FeedbackOf(setting, s, own.size())});
      kernels.push_back({begin, size, found.FeedbackOf(setting, s, kernels.size())});
      expected_sums.back().emplace_back(static_cast<size_t>(size), 9.0f);
      sums.back().emplace_back(static_cast<size_t>(size), 9.0f);
    }
    for (size_t i = 0; i < own.size(); ++i) {
      outs.push_back({own[i].begin, own[i].size, expected_sums.back()[i].data()});
      kernel_outs.push_back({own[i].begin, own[i].size, {sums.back()[i].data(), nullptr}});
    }
    const Words& payload = sent.payloads[s];
    gathered.push_back(payload);
    gathered.back().resize(2000);  // the same distance for all
    gathered.back().insert(gathered.back().end(), payload.begin(), payload.end());
    EXPECT_STATUS(StatusKind::kOk, ClearSent(format, BytesOf(sent.payloads[s]), own, kept), "clear");
    std::vector<Source> sources;
    EXPECT_STATUS(StatusKind::kOk, AppendSources(format, BytesOf(gathered.back()), 2, 16000, &sources), "sources");
    EXPECT_STATUS(StatusKind::kOk, ReduceSources(format, sources, 0.3f, SerialFor, outs), "reduce");
    cleared.push_back({plan, BytesOf(sent.payloads[s]), kernels});
    summed.push_back({plan, nullptr, kernel_outs});
  }
  for (size_t s = 0; s < summed.size(); ++s) summed[s].first = BytesOf(gathered[s]);
  DecodeStatus status{0, 0};
  Scratch workspace(std::max(reduce_workspace_size(cleared, 1), reduce_workspace_size(summed, 2)));
  EXPECT_EQ(cudaSuccess, clear_launch(cleared, kept, &status, workspace.data(), nullptr), "clear");
  EXPECT_EQ(cudaSuccess, reduce_launch(summed, 2, 16000, 0.3f, &status, workspace.data(), nullptr), "reduce");
  EXPECT_EQ(0u, status.refused, NameOf(setting));
  ExpectSameFeedback(setting, expected, found);
  for (size_t s = 0; s < sums.size(); ++s) {
    for (size_t i = 0; i < sums[s].size(); ++i) {
      EXPECT(SameFloats(expected_sums[s][i], sums[s][i]), NameOf(setting) << ", sum " << i << " of selection " << s);
    }
  }
}

inline void Check(const Setting& setting) {
  Side expected(setting), found(setting);
  for (uint64_t step = 0; step < 2; ++step) {
    const Gradients gradients(setting, 100 * step);
    Outcome wanted = RunCore(setting, gradients, expected);
    Outcome got = RunKernels(setting, gradients, found);
    ExpectSameFeedback(setting, expected, found);
    for (size_t s = 0; s < wanted.payloads.size(); ++s) {
      EXPECT(wanted.payloads[s] == got.payloads[s], NameOf(setting) << ", payload " << s << ", step " << step);
      EXPECT_EQ(wanted.info[s], got.info[2 * s], NameOf(setting));
    }
    for (size_t i = 0; i < gradients.wide.size(); ++i) {
      EXPECT_EQ(wanted.finite[i], got.finite[i], NameOf(setting) << ", gradient " << i);
    }
    CheckWayBack(setting, got, step == 0 ? 0.0f : 0.7f, expected, found);
  }
}

inline std::vector<const Shape*> AllShapes() {
  std::vector<const Shape*> all;
  for (const Shape& shape : kShapes) all.push_back(&shape);
  return all;
}

}  // namespace hvd_sparse
