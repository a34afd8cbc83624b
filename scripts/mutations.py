"""The faults that scripts/mutate.py plants: what a test suite of this project must find."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A change of one line, and the test that should find it."""

    name: str
    file: str
    old: str  # stands in the file just once
    new: str
    test: str  # "native VERB", or "single", "torch", "tensorflow" (the last two on two or three ranks), a file, a -k expression


CORE = [
    (
        "clip factor ignored",
        "accumulate.cc",
        "(IsFinite(value) ? value : 0.0f) * factor",
        "(IsFinite(value) ? value : 0.0f)",
        "accumulate",
    ),
    (
        "weight decay ignored",
        "accumulate.cc",
        "local[i] += parameter[i] * weight_decay",
        "local[i] += parameter[i] * 0",
        "accumulate",
    ),
    (
        "NaN accumulated",
        "accumulate.cc",
        "Update<rule>(finite ? gradient[i] : 0.0f,",
        "Update<rule>(gradient[i],",
        "accumulate",
    ),
    (
        "velocities stay denormal",
        "update.h",
        "MagnitudeBits(velocity) < 0x00800000u",
        "MagnitudeBits(velocity) < 0x00000001u",
        "accumulate",
    ),
    (
        "overflow in a chunk unseen",
        "accumulate.cc",
        "if (most >= kInfinityBits<float>)",
        "if (most > 2 * kInfinityBits<float>)",
        "accumulate",
    ),
    (
        "an element at the threshold is no candidate",
        "accumulate.cc",
        "return most >= bar;",
        "return most > bar;",
        "accumulate",
    ),
    (
        "last part of a bucket skipped",
        "accumulate.cc",
        "for (size_t i = 0; i < parts.size(); ++i) {",
        "for (size_t i = 0; i + 1 < parts.size() || i == 0; ++i) {",
        "bucket",
    ),
    (
        "k - 1 candidates are enough",
        "select.cc",
        ">= params.k;\n    const bool all",
        ">= params.k - 1;\n    const bool all",
        "select",
    ),
    ("NaN before zeros", "select.cc", "{false, true}", "{true, false}", "select"),
    (
        "ties cut by position",
        "candidates.h",
        "HashOf(entry) <= last_tie_",
        "static_cast<uint64_t>(entry.index) <= last_tie_",
        "select",
    ),
    (
        "threshold one too low",
        "threshold.cc",
        "while (rank > counts[digit])",
        "while (rank >= counts[digit])",
        "threshold",
    ),
    (
        "half the quantile of the sample",
        "threshold.cc",
        "std::max<int64_t>(1, static_cast<int64_t>(wide))",
        "std::max<int64_t>(1, static_cast<int64_t>(wide) / 2)",
        "threshold",
    ),
    (
        "run counted from the entry before",
        "run_length.cc",
        "std::max(previous + 1, block * kBlock)",
        "std::max(previous, block * kBlock)",
        "run_length",
    ),
    (
        "run past its block accepted",
        "run_length.cc",
        "if (count + zeros > length)",
        "if (count + zeros > length + 1)",
        "run_length",
    ),
    (
        "checksum not checked",
        "payload.cc",
        'HVD_SPARSE_RETURN_IF_ERROR(Expect("checksum", Checksum(payload, size), header.checksum));',
        "",
        "validate",
    ),
    (
        "a byte after the last payload accepted",
        "payload.cc",
        'const Status status = Expect("messages\' size in bytes", at, size);',
        "const Status status = Status::Ok();",
        "locate",
    ),
    (
        "Elias-Fano: low bits of the entry before",
        "elias_fano.cc",
        "const int64_t bit = j * low;",
        "const int64_t bit = (j > 0 ? j - 1 : 0) * low;",
        "elias_fano",
    ),
    (
        "bitmap: one bit too many accepted",
        "elias_fano.cc",
        "if (j == k || position >= bits)",
        "if (position >= bits)",
        "validate",
    ),
    (
        "payloads added in reverse",
        "reduce.cc",
        "for (const Addend& addend : addends) {\n      const auto at",
        "for (auto reverse = addends.rbegin(); reverse != addends.rend(); ++reverse) {\n      const Addend& addend = *reverse;\n      const auto at",
        "reduce",
    ),
    ("scale ignored", "reduce.cc", "*place += scale * value(j);", "*place += value(j);", "reduce"),
    (
        "last element not cleared",
        "reduce.cc",
        "ClearRange(slices, first, first + length)",
        "ClearRange(slices, first, first + length - 1)",
        "reduce",
    ),
    ("rounding error dropped", "bucket.cc", "0.0f : *residual - sent;", "0.0f : 0.0f;", "bucket"),
    (
        "momentum not masked",
        "bucket.cc",
        "slice->feedback.velocity[index - slice->begin] = 0.0f;",
        "slice->feedback.velocity[index - slice->begin] *= 1.0f;",
        "bucket",
    ),
    (
        "what equals the mean is small",
        "low_bit.cc",
        "MagnitudeBits(values[j])) >= split[group_of(j)]",
        "MagnitudeBits(values[j])) > split[group_of(j)]",
        "low_bit",
    ),
]

PYTHON = [
    (
        "momentum not masked, PyTorch",
        "hvd_sparse/torch/error_feedback.py",
        "return (self.residual, self.velocity) if self.algorithm.factor_masking else (self.residual,)",
        "return (self.residual,)",
        "torch test_oracle",
    ),
    (
        "momentum not masked, TensorFlow",
        "hvd_sparse/tensorflow/error_feedback.py",
        "return (self.residual, self.velocity) if self.algorithm.factor_masking else (self.residual,)",
        "return (self.residual,)",
        "tensorflow test_tape_oracle",
    ),
    (
        "Nesterov of a dense tensor without the gradient, TensorFlow",
        "hvd_sparse/tensorflow/error_feedback.py",
        "return velocity, [velocity, local]",
        "return velocity, [velocity]",
        "tensorflow test_tape_oracle",
    ),
    (
        "no vote, PyTorch",
        "hvd_sparse/torch/step.py",
        "overflow |= bad > 0",
        "overflow |= False",
        "torch test_overflow",
    ),
    (
        "op=Min accepted, PyTorch",
        "hvd_sparse/torch/tokens.py",
        "if abs(ids - ones * (ranks + 1) / 2) > 1e-4 * abs(ids):",
        "if False:",
        "torch test_refused",
    ),
    (
        "SAMomentum forgets what is sent, PyTorch",
        "hvd_sparse/torch/error_feedback.py",
        "return self.algorithm.momentum",
        "return 0.0",
        "torch test_oracle",
    ),
    (
        "SAMomentum forgets what is sent, TensorFlow",
        "hvd_sparse/tensorflow/error_feedback.py",
        "return self.algorithm.momentum",
        "return 0.0",
        "tensorflow test_tape_oracle",
    ),
    (
        "warm-up a step late",
        "hvd_sparse/schedule.py",
        "if step >= self.steps or not stages:",
        "if step > self.steps or not stages:",
        "single test_schedule",
    ),
    (
        "stale threshold",
        "hvd_sparse/threshold.py",
        "self._value, self._k = max(threshold, SMALLEST), k",
        "self._k = k",
        "torch test_thresholds",
    ),
    (
        "threshold never refreshed",
        "hvd_sparse/threshold.py",
        "return step % lifespan == position * lifespan // self._count",
        "return False",
        "torch test_thresholds",
    ),
    (
        "partitions do not rotate",
        "hvd_sparse/threshold.py",
        "number = (step + rank) % ranks",
        "number = rank % ranks",
        "torch test_micro",
    ),
    (
        "the leader is always the first",
        "hvd_sparse/torch/codecs/shared_indices.py",
        "if now.number % now.world_size != now.rank:",
        "if now.rank != 0:",
        "torch test_thresholds cltk",
    ),
    (
        "quantization error dropped",
        "hvd_sparse/torch/codecs/shared_indices.py",
        "return indices, total[: len(indices)], values - sent",
        "return indices, total[: len(indices)], None",
        "torch test_low_bit",
    ),
    (
        "a frozen parameter sends, PyTorch",
        "hvd_sparse/torch/codecs/base.py",
        "if not entry.frozen}",
        "}",
        "torch test_frozen",
    ),
    (
        "a frozen parameter sends the last message again, PyTorch",
        "hvd_sparse/torch/codecs/fixed_count.py",
        "if name not in training:",
        "if False:",
        "torch test_frozen",
    ),
    (
        "what was held is not put back, PyTorch",
        "hvd_sparse/torch/codecs/shared_indices.py",
        "self.feedback[name].buffer(kind).add_(kept)",
        "self.feedback[name].buffer(kind).add_(0.0)",
        "torch test_frozen",
    ),
    (
        "clipped by the tensor's norm where the model's was asked for, PyTorch",
        "hvd_sparse/torch/step.py",
        "self._whole_factor if self._clips_model else feedback.factor",
        "feedback.factor",
        "torch test_oracle",
    ),
    (
        "the leader is always the first, TensorFlow",
        "hvd_sparse/tensorflow/codecs/shared_indices.py",
        "tf.equal(now.number % world_size, rank)",
        "tf.equal(0, rank)",
        "tensorflow test_tape_thresholds cltk",
    ),
    (
        "no vote, TensorFlow",
        "hvd_sparse/tensorflow/step.py",
        "now.overflow = sums[0] > 0.0",
        "now.overflow = sums[0] > 1e9",
        "tensorflow test_tape_overflow",
    ),
    (
        "state of another method accepted",
        "hvd_sparse/checkpoint.py",
        "if kind not in kinds[name]:",
        "if False:",
        "torch test_state",
    ),
    (
        "server adds where it should subtract",
        "hvd_sparse/parameter_server/tracker.py",
        "update.indices, update.values)\n            self._log.append(changed, clock)\n            self._shorten()",
        "update.indices, -update.values)\n            self._log.append(changed, clock)\n            self._shorten()",
        "single test_parameter_server_exact",
    ),
    (
        "a repeated push is refused",
        "hvd_sparse/parameter_server/server.py",
        "if message.sequence == record.sequence and message.sequence > 0:",
        "if False:",
        "single test_parameter_server_soak",
    ),
    (
        "server does not advance its clock",
        "hvd_sparse/parameter_server/server.py",
        "self.clock += 1",
        "self.clock += 0",
        "single test_parameter_server_exact",
    ),
    (
        "NaN in an update accepted",
        "hvd_sparse/parameter_server/updates.py",
        "if not np.isfinite(update.values).all():",
        "if False:",
        "single test_protocol",
    ),
    (
        "boundary lets the wrong half through",
        "hvd_sparse/model_parallel/torch/boundary.py",
        "return torch.where(mask, activations, activations.new_zeros(()))",
        "return torch.where(~mask, activations, activations.new_zeros(()))",
        "single test_torch_boundary",
    ),
]

MUTATIONS = [Mutation(name, f"csrc/core/{file}", old, new, f"native {test}") for name, file, old, new, test in CORE]
MUTATIONS += [Mutation(*fault) for fault in PYTHON]
