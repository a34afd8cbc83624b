// Several selections in one launch, and several tensors in one selection, with kernels run on the host.
#include "../../csrc/cuda/accumulate.h"
#include "device/buckets.h"

namespace hvd_sparse {
namespace {

TEST(TensorsThatShareASelection) {
  for (const Shape& shape : kShapes) {
    for (const bool contiguous : {true, false}) {
      for (const double hint : {0.0, 1.0, 2.5, 1e9}) {
        Check({{&shape}, Coding::kRunLength, DType::kFloat32, AccumulateRule::kMomentum, hint, contiguous});
      }
    }
  }
}

TEST(SelectionsInOneLaunch) {
  for (const Coding coding : {Coding::kRunLength, Coding::kEliasFano, Coding::kBitmap, Coding::kAuto, Coding::kDense}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kNone}) {
      Check({AllShapes(), coding, dtype, AccumulateRule::kNesterov, 1.5, false});
    }
  }
  for (const double hint : {0.0, 1e-3, 1e9}) {
    Check({AllShapes(), Coding::kRunLength, DType::kFloat16, AccumulateRule::kResidual, hint, true});
  }
}

// Returns the number of residuals of a selection that reach a magnitude.
int64_t CountReaching(const Setting& setting, Side& side, size_t s, double magnitude) {
  int64_t count = 0;
  for (size_t i = 0; i < setting.shapes[s]->members.size(); ++i) {
    const float* residual = side.FeedbackOf(setting, s, i).residual;
    count += std::count_if(residual, residual + setting.shapes[s]->members[i].second,
                           [magnitude](float value) { return std::abs(static_cast<double>(value)) >= magnitude; });
  }
  return count;
}

TEST(HintsStayOnTheDevice) {
  Setting setting{AllShapes()};
  setting.hint = 1e9;  // replaced
  Side expected(setting), found(setting);
  std::vector<Hint> hints(setting.shapes.size(), Hint{0, kFirstMargin, 0}), expected_hints = hints;
  for (uint64_t step = 0; step < 4; ++step) {
    const Gradients gradients(setting, 100 * step);
    const Outcome wanted = RunCore(setting, gradients, expected);
    const Outcome got = RunKernels(setting, gradients, found, hints.data());
    for (size_t s = 0; s < hints.size(); ++s) {
      const int64_t k = FormatOf(setting, s).k;
      const double guess = HintFor(expected_hints[s], k);
      EXPECT(wanted.payloads[s] == got.payloads[s], "payload " << s << ", step " << step);
      EXPECT_EQ(guess > 0, step > 0, "step " << step);
      const int64_t passed = guess > 0 ? CountReaching(setting, found, s, guess) : k;
      EXPECT_EQ(static_cast<double>(passed), got.info[2 * s + 1], "selection " << s << ", step " << step);
      LearnHint(&expected_hints[s], k, wanted.info[s], passed);
      EXPECT_EQ(expected_hints[s].threshold, hints[s].threshold, "selection " << s << ", step " << step);
      EXPECT_EQ(expected_hints[s].margin, hints[s].margin, "selection " << s << ", step " << step);
      EXPECT_EQ(expected_hints[s].k, hints[s].k, "selection " << s << ", step " << step);
    }
  }
}

TEST(AwkwardGradients) {
  for (const Kind kind : kKinds) {
    for (const bool active : {true, false}) {
      Check({AllShapes(), Coding::kAuto, DType::kFloat32, AccumulateRule::kMomentum, 2.0, false, active, kind});
    }
  }
}

TEST(TensorsWithoutASelection) {
  constexpr int64_t kBeyond = 64;
  for (const Kind kind : {Kind::kNormal, Kind::kNan}) {
    const Setting setting{AllShapes(), Coding::kRunLength, DType::kFloat32, AccumulateRule::kMomentum, 0.0, false, true,
                          kind};
    const Gradients gradients(setting, 11);
    Side expected(setting);
    Side found(setting);
    const Outcome core = RunCore(setting, gradients, expected);
    std::vector<Part> parts;
    size_t member = 0;
    for (size_t s = 0; s < setting.shapes.size(); ++s) {
      for (const Part& part : PartsOf(setting, gradients, found, s, &member)) parts.push_back(part);
    }
    const int64_t size = accumulate_workspace_size(parts);
    Scratch workspace(size + kBeyond);
    const auto finite = std::make_unique<bool[]>(member);
    EXPECT_EQ(cudaSuccess, accumulate_launch(parts, finite.get(), workspace.data(), nullptr), "accumulate");
    ExpectSameFeedback(setting, expected, found);
    for (size_t i = 0; i < member; ++i) EXPECT_EQ(core.finite[i], finite[i], i);
    for (int64_t i = size; i < size + kBeyond; ++i) {
      EXPECT_EQ(0xa5, static_cast<const uint8_t*>(workspace.data())[i], "beyond the workspace");
    }
  }
}

TEST(NobodyTakesPart) {
  const Shape empty{"nobody", 3000, {}};
  Check({{&empty}, Coding::kRunLength, DType::kFloat32});
  int64_t size = 7;
  EXPECT_EQ(cudaSuccess, accumulate_bucket_workspace_size({}, &size), "an empty bucket");
  EXPECT_EQ(int64_t{0}, size, "an empty bucket");
  EXPECT_EQ(int64_t{0}, reduce_workspace_size({}, 3), "an empty bucket");
  EXPECT_EQ(cudaSuccess, reduce_launch({}, 3, 0, 1.0f, nullptr, nullptr, nullptr), "an empty bucket");
}

TEST(OneDamagedPayloadOfABucketSpoilsItsOwnSelection) {
  const Setting setting{{&kShapes[0], &kShapes[1]}};
  Side side(setting);
  const Gradients gradients(setting, 3);
  Outcome sent = RunKernels(setting, gradients, side);
  BytesOf(sent.payloads[1])[40] ^= 1;
  ReduceSelections summed;
  std::vector<Floats> sums(2, Floats(3000, 9.0f));
  for (size_t s = 0; s < 2; ++s) {
    summed.push_back({{}, BytesOf(sent.payloads[s]), {{0, 3000, {sums[s].data(), nullptr}}}});
    EXPECT_STATUS(StatusKind::kOk, MakePlan(FormatOf(setting, s), &summed[s].plan), "plan");
  }
  DecodeStatus status{0, 0};
  Scratch workspace(reduce_workspace_size(summed, 1));
  EXPECT_EQ(cudaSuccess, reduce_launch(summed, 1, 0, 1.0f, &status, workspace.data(), nullptr), "reduce");
  EXPECT_EQ(1u, status.refused, "selections");
  EXPECT_EQ(static_cast<int64_t>(PayloadCheck::kChecksum), static_cast<int64_t>(status.first), "which");
  for (size_t i = 0; i < 3000; ++i) {
    EXPECT(std::isfinite(sums[0][i]), i);
    EXPECT(std::isnan(sums[1][i]), i);
  }
}

}  // namespace
}  // namespace hvd_sparse
