"""The faults that scripts/mutate.py plants: what a test suite of this project must find."""

from typing import NamedTuple

from mutations_core import CORE
from mutations_cuda import CUDA
from mutations_ddp import DDP
from mutations_mpi import MPI
from mutations_tensorflow import TENSORFLOW


class Mutation(NamedTuple):
    """A change of a line or two, and the test that should find it."""

    name: str
    file: str
    old: str  # stands in the file just once
    new: str
    test: str  # "native VERB", or "single", "ddp" (2 ranks), "torch", "tensorflow" (2 and 3), a file, a -k expression


PYTHON = [
    (
        "momentum not masked, PyTorch",
        "hvd_sparse/torch/error_feedback.py",
        "return (self.residual, self.velocity) if self.algorithm.factor_masking else (self.residual,)",
        "return (self.residual,)",
        "torch test_oracle",
    ),
    (
        "Nesterov of a dense tensor without the gradient, PyTorch",
        "hvd_sparse/torch/error_feedback.py",
        "if self.algorithm.nesterov:\n            add(sent)",
        "if False:\n            add(sent)",
        "torch test_density_one",
    ),
    (
        "the first step's gradients stay, PyTorch",
        "hvd_sparse/torch/step.py",
        "        self._late = []\n        self.codec.end()",
        "        self.codec.end()",
        "torch test_memory",
    ),
    (
        "a step that is given up is not completed, PyTorch",
        "hvd_sparse/torch/compressor.py",
        "if answers is not None:\n                with",
        "if False:\n                with",
        "torch test_given_up",
    ),
    (
        "after backward ranks have made different numbers of calls, PyTorch",
        "hvd_sparse/torch/presence.py",
        "            self.has_waited_in_vain = not self.pending.is_done_in_time(ANSWER_SECONDS)",
        "            if not self.pending.is_done():\n                return False",
        "torch test_unnamed_collectives within_a_backward",
    ),
    (
        "backward waits in each step for a rank without gradients, PyTorch",
        "hvd_sparse/torch/compression.py",
        "        self._steps_off = STEPS_AFTER_A_WAIT << min(self._waits_in_vain, 6)\n",
        "",
        "torch test_unnamed_collectives without_gradients_once",
    ),
    (
        "a late rank sends in backward what others send later, PyTorch",
        "hvd_sparse/torch/presence.py",
        "return seconds > 0.9 * ANSWER_SECONDS",
        "return False",
        "torch test_unnamed_collectives so_late",
    ),
    (
        "a rank with several compressors alone sends no payload in backward, PyTorch",
        "hvd_sparse/torch/presence.py",
        "return early == int(first) % MOST_RANKS",
        "return True",
        "torch test_unnamed_collectives nothing_uses",
    ),
    (
        "reset does not start the next check of settings, PyTorch",
        "hvd_sparse/torch/compressor.py",
        "            self._check.forget()\n            self._start_check()",
        "            self._check.forget()",
        "torch test_unnamed_collectives collected_on_one_rank",
    ),
    (
        "small tensors are added in float16, PyTorch",
        "hvd_sparse/torch/error_feedback.py",
        "(dtype == torch.float16 and not always)",
        "False",
        "torch test_hierarchical 16_bits",
    ),
    (
        "no vote, PyTorch",
        "hvd_sparse/torch/step.py",
        "overflow, seconds = overflow or sums.bad > 0, sums.seconds",
        "overflow, seconds = False, sums.seconds",
        "torch test_overflow",
    ),
    (
        "op=Min accepted, PyTorch",
        "hvd_sparse/torch/tokens.py",
        "if abs(ids - ones * (world_size + 1) / 2) > 1e-4 * abs(ids):",
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
        "warm-up a step late",
        "hvd_sparse/schedule.py",
        "final if step >= self.steps or not stages else",
        "final if step > self.steps or not stages else",
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
        "return (step - start) % lifespan == position * lifespan // self._count",
        "return False",
        "torch test_thresholds",
    ),
    (
        "a threshold outlives its life-span",
        "hvd_sparse/threshold.py",
        "return (step - start) % lifespan",
        "return step % lifespan",
        "single test_threshold_state",
    ),
    (
        "what a sum loses comes back whole with SAMomentum, PyTorch",
        "hvd_sparse/torch/error_feedback.py",
        "part = (1.0 - self.retained) * rest_of",
        "part = rest_of",
        "torch test_half samomentum_has",
    ),
    (
        "the name of a presence check in flight is used again",
        "hvd_sparse/torch/exchange.py",
        "            if self._asked is not None:\n",
        "            if False:\n",
        "torch test_state within",
    ),
    (
        "small tensors that are dense for good make large ones dense",
        "hvd_sparse/dense_fallback.py",
        "costs_more = self._costs_more(self._compared, density)",
        "costs_more = self._costs_more(tuple(self._tensors), density)",
        "single test_dense_fallback",
    ),
    (
        "partitions do not rotate",
        "hvd_sparse/partition.py",
        "number = (step + rank) % world_size",
        "number = rank % world_size",
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
        "return total[back], (values - sent)[back], sketches",
        "return total[back], None, sketches",
        "torch test_low_bit",
    ),
    (
        "a frozen parameter sends, PyTorch",
        "hvd_sparse/torch/codecs/base.py",
        "if not arrival.frozen}",
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
        "state of another method accepted",
        "hvd_sparse/checkpoint.py",
        "if kind not in kinds:",
        "if False:",
        "torch test_state",
    ),
    (
        "only the first span of a sum is shared out",
        "hvd_sparse/checkpoint.py",
        "for begin in range(0, total.size, SPAN):",
        "for begin in range(0, min(total.size, 1), SPAN):",
        "single test_checkpoint_files",
    ),
    (
        "a loaded mean changes with the number of ranks",
        "hvd_sparse/checkpoint.py",
        'if state.get("averages", True) else 1.0',
        "if False else 1.0",
        "torch test_state fewer_ranks",
    ),
    (
        "a rank that resets alone waits for the others",
        "hvd_sparse/torch/configuration_check.py",
        "        if self._passed_in is not None:  # not its truth",
        "        if self._passed_in:  # its truth",
        "torch test_refused alone_between",
    ),
    (
        "discarded gradients are not noticed",
        "hvd_sparse/torch/compression.py",
        "            self._optimizer_checks.after_reduction(",
        "            list(",
        "torch test_training_loops discarded",
    ),
    (
        "weights that differ at first are not noticed",
        "hvd_sparse/torch/weights_check.py",
        "values[trains].unique().numel() > 1",
        "values[trains].unique().numel() > 2",
        "torch test_weights_check first_parameter",
    ),
    (
        "what Horovod does not reduce is not noticed",
        "hvd_sparse/torch/gradient_checks.py",
        "if one not in reduced and one.requires_grad",
        "if one in reduced and not one.requires_grad",
        "torch test_unreduced does_not_reduce",
    ),
    (
        "a copy back to the GPU is taken for a change",
        "hvd_sparse/torch/gradient_checks.py",
        "if any(is_cuda(one.passed.device) and one.is_lent for one in sharing):",
        "if any(is_cuda(one.passed.device) and one.carries_token for one in sharing):",
        "torch test_device copy_back",
    ),
    (
        "every change of a dense gradient on a GPU is taken for Horovod's",
        "hvd_sparse/torch/gradient_checks.py",
        "if any(is_cuda(one.passed.device) and one.is_lent for one in sharing):",
        "if any(is_cuda(one.passed.device) for one in sharing):",
        "torch test_device a_change_of_a_dense_gradient",
    ),
    (
        "sketches are made on the default device, PyTorch",
        "hvd_sparse/torch/codecs/shared_indices.py",
        'rows = torch.zeros(self.now.world_size, len(sketch), dtype=torch.float32, device="cpu")',
        "rows = torch.zeros(self.now.world_size, len(sketch), dtype=torch.float32)",
        "torch test_default_device micro",
    ),
    (
        "regions keep the names of the saved state",
        "hvd_sparse/checkpoint.py",
        "regions = [([new[name] for name in joint], bounds)",
        "regions = [(list(joint), bounds)",
        "single test_checkpoint_files",
    ),
    (
        "a selection of one's own is charged nothing",
        "hvd_sparse/dense_fallback.py",
        "return values + algorithm.index_bytes(n, k, self.world_size)",
        "return values",
        "single test_dense_fallback",
    ),
    (
        "a hierarchical state waits for other ranks",
        "hvd_sparse/torch/hierarchical.py",
        "self.has_state = False",
        "self.has_state = True",
        "torch test_hierarchical_changes state_alone",
    ),
    (
        "a warning names Horovod's line",
        "hvd_sparse/frames.py",
        "stacklevel=2 + next(levels, len(around) - 1)",
        "stacklevel=2",
        "torch test_training_loops momentum_of_adam",
    ),
    (
        "a turn in a dense step is lost, PyTorch",
        "hvd_sparse/torch/codecs/threshold.py",
        "if name not in self._planned:",
        "if False:",
        "torch test_kept_thresholds turn",
    ),
    (
        "any optimizer without the compressor is warned of",
        "hvd_sparse/torch/optimizer_checks.py",
        'if not isinstance(getattr(optimizer, "_compression", type), type):',
        "if False:",
        "torch test_training_loops is_used",
    ),
    (
        "what Horovod and the compressor lack is refused, not warned of",
        "hvd_sparse/torch/gradient_checks.py",
        "if (name := names.get(id(one))) and name not in",
        "if (name := names.get(id(one))) not in",
        "torch test_unreduced lacks_too",
    ),
    (
        "a parameter of another compressor is warned of, Horovod",
        "hvd_sparse/torch/optimizer_checks.py",
        "compressed = set().union(*(checks._ids for checks in _all))",
        "compressed = set()",
        "torch test_unreduced another_compressor",
    ),
    (
        "a compressor that was built later has the checks",
        "hvd_sparse/torch/optimizer_checks.py",
        "if self not in _checks:",
        "if False:",
        "torch test_training_loops others_were_built",
    ),
    (
        "process sets that Horovod has forgotten have no size",
        "hvd_sparse/members.py",
        "if which not in self._known or is_elastic():",
        "if True:",
        "single test_before_init another_rank",
    ),
    (
        "parameters in dense are compressed, hierarchical, PyTorch",
        "hvd_sparse/torch/hierarchical.py",
        "if n >= hierarchy.shards and self.algorithm.compresses(name, n)]",
        "if n >= max(hierarchy.shards, self.algorithm.min_numel)]",
        "torch test_dense_parameters hierarchical",
    ),
    (
        "parameters in dense count for exchange=auto, PyTorch",
        "hvd_sparse/torch/codecs/owned_regions.py",
        "self._numels = [numel for name, numel in numels if self.algorithm.compresses(name, numel)]",
        "self._numels = [numel for name, numel in numels]",
        "torch test_dense_parameters automatic",
    ),
]

MUTATIONS = [Mutation(name, f"csrc/core/{file}", old, new, f"native {test}") for name, file, old, new, test in CORE]
MUTATIONS += [Mutation(name, f"csrc/cuda/{file}", old, new, f"native {test}") for name, file, old, new, test in CUDA]
MUTATIONS += [Mutation(*fault) for fault in (*PYTHON, *DDP, *TENSORFLOW, *MPI)]
