"""The compressors for `hvd.DistributedOptimizer(..., compression=Compression.dgc(...))` of an unmodified Horovod.

`compress` starts a named all-gather of the payload and returns a small token, which Horovod all-reduces; `decompress`
waits, sums the payloads of all ranks in rank order, and scales the sum by the reduced token, so that op=Sum, Average
and gradient_predivide_factor work as usual.
"""

import gc
import itertools
import weakref
from time import monotonic

import horovod.torch as hvd
import torch
from horovod.torch.elastic.state import get_handler_registry

from hvd_sparse.algorithms import Algorithm, CompressionMethods
from hvd_sparse.frames import warn
from hvd_sparse.messages import not_called, not_compressed
from hvd_sparse.torch.caller import calling_optimizer, reduces_again, runs_backward
from hvd_sparse.torch.codecs.base import Arrival
from hvd_sparse.torch.collectives.horovod import HorovodCollectives
from hvd_sparse.torch.compressor import Compressor
from hvd_sparse.torch.elastic import CompressionStateHandler
from hvd_sparse.torch.gradient_checks import GradientChecks
from hvd_sparse.torch.in_flight import extra_reference
from hvd_sparse.torch.optimizer_checks import DISCARDED, have_gradients
from hvd_sparse.torch.parameters import NamedParameters
from hvd_sparse.torch.presence import ANSWER_SECONDS, is_late
from hvd_sparse.torch.tokens import reduction_scale
from hvd_sparse.torch.weights_check import WeightsCheck
from hvd_sparse.turns_check import TurnsCheck
from hvd_sparse.units import REDUCTION_UNKNOWN, REDUCTIONS, Units, reduction_differs

STEP_HAS_FAILED = (
    "hvd_sparse: this step has ended with an error, and cannot go on. To go on with the next one, on every rank: "
    "optimizer.load_state_dict(optimizer.state_dict()); optimizer.zero_grad(); compression.reset(), or "
    "compression.load_state_dict() with a state from before"
)
WAITED_IN_VAIN = (
    "hvd_sparse: in backward(), this rank has waited {:g} s for another rank, which has no gradient of this step yet: "
    "it has skipped its backward pass, is late, or waits for this rank in a collective of its backward pass. In the "
    "next {} steps payloads are sent in optimizer.step() only, so that backward() does not wait"
)
STEPS_AFTER_A_WAIT = 16  # in which nothing is sent in backward, after a wait in vain; then 32, 64, ..., at most 1024
_clock = itertools.count(1)  # of the steps of all compressors
_compressors: weakref.WeakSet["SparseCompressor"] = weakref.WeakSet()


class SparseCompressor(Compressor):
    """A compressor with error feedback, for one optimizer; made by the methods of `Compression`.

    A gradient that is not finite on any rank skips the step on all ranks: every gradient becomes NaN (a loss scaler
    then skips its update), and the residual adds zero for elements that are not finite.

    Args:
        algorithm: The settings of a method, from `hvd_sparse.algorithms`.
        parameters: What the optimizer trains: the model, or (name, parameter) pairs.
        process_set: The optimizer's `hvd.ProcessSet`; None: all ranks.

    Raises:
        ValueError: An argument is wrong. In the first step, on every rank: models or settings differ between
            ranks, or the reduction is not Sum or Average. In a step: damaged payloads.
        TypeError: An argument has the wrong type.
        RuntimeError: In a step: `hvd.join()`, ranks at different steps, `optimizer.step(closure)`, gradients that were
            changed after backward; on a CUDA device, payloads that were damaged in the step before.
    """

    def __init__(self, algorithm: Algorithm, parameters: NamedParameters, process_set=None):
        self._collectives = HorovodCollectives(process_set)
        super().__init__(algorithm, parameters, self._collectives)
        self._open: set[str] = set()  # compressed, not yet decompressed
        self._references: list[torch.Tensor] = []  # gradients that Horovod all-reduces
        self._optimizers = TurnsCheck()
        self._weights_check = WeightsCheck(self._parameters, self._collectives)
        self._gradient_checks = GradientChecks(self._parameters, self._collectives)
        self._waits_in_vain = 0  # in backward, for a rank that had no gradient
        self._steps_off = 0  # the number of next steps in which nothing is sent in backward, after a wait in vain
        self._began = [0, 0, 0]  # by `_clock`, the last three steps; 0: none
        self._ended_at = monotonic()  # when this rank began to send what was left of the last step
        self._has_warned_of_sparse = False
        _compressors.add(self)
        self._start_check()
        if algorithm.replaces_optimizer and self._collectives.is_alone():
            warn(not_called(algorithm.name))

    # A compiled step calls compress and decompress. Inductor fails if it traces their collectives.
    @torch.compiler.disable
    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Arrival]:
        """Compress one gradient; return the tensor for Horovod to all-reduce, and the context for `decompress`."""
        if torch.is_grad_enabled():  # not in a hook of autograd, where this is called for nearly every gradient
            with torch.no_grad():
                return self.compress(tensor)
        with self._lock:
            if self._check.is_due():
                self._check_configuration()
            with self._traffic.timed("compress"):
                step, parameters = self._step, self._parameters
                if not self._under_way or self._finished:
                    self._begin()
                name = parameters.find(tensor, step.arrivals)
                if not step.arrivals:
                    self._optimizer_checks.check_reduction([parameters[name]], DISCARDED)
                if name in step.arrivals:  # the step was given up: its optimizer never stepped
                    self._refuse_two_optimizers(step.arrivals[name], tensor)
                    self._begin()
                step.sends_early = step.sends_early and runs_backward()
                arrival = self._arrival_of(name, tensor, not parameters[name].requires_grad)
                carried = step.add(arrival)
                if step.sends_early and step.has_waited_in_vain():
                    self._stop_sending_early()
                arrival.version = tensor._version
                if not arrival.carries_token:
                    arrival.is_lent = carried.data_ptr() == tensor.data_ptr()
                    self._references.append(extra_reference(carried))
                self._open.add(name)
                return carried, arrival

    @torch.compiler.disable
    def decompress(self, tensor: torch.Tensor, ctx: Arrival | None) -> torch.Tensor:
        """Return the reduced gradient, of the parameter's shape and type. Sparse gradients (ctx None) pass through."""
        if ctx is None:
            self._warn_of_sparse()
            return tensor
        if tensor is None:  # Horovod has given its result to an earlier call
            raise RuntimeError(STEP_HAS_FAILED)
        with self._lock:
            if self._step.arrivals.get(ctx.name) is not ctx:
                raise RuntimeError(
                    f"hvd_sparse: the gradient of {ctx.name} was compressed before reset() or load_state_dict(); call "
                    "these between optimizer steps"
                )
            if not self._finished:
                self._finish()
            with self._traffic.timed("decompress"):
                result = self._result(tensor, ctx)
                if ctx.origin is not None:
                    with torch.no_grad():
                        result = ctx.origin.copy_(result)
            self._open.discard(ctx.name)
            if not self._open:
                self._end()
            return result

    def restore_own(self, state: dict) -> None:
        """Load a state of this process, from before an elastic job was reset: its ranks may have other numbers now."""
        own = {key: value for key, value in state.items() if key != "shard"}
        self.load_state_dict({**own, "ranks": self._exchange.size(), "rank": self._exchange.rank()})

    def _refuse_two_optimizers(self, arrival: Arrival, tensor: torch.Tensor) -> None:
        """Raise RuntimeError if the gradient of an arrival, unchanged, comes again from another optimizer."""
        optimizer, is_same = calling_optimizer(self), arrival.passed is tensor and arrival.version == tensor._version
        if is_same and optimizer is not None and self._optimizers.is_by_another(optimizer):
            raise RuntimeError(
                f"hvd_sparse: two of Horovod's optimizers reduce the gradient of {arrival.name}. The hooks of the "
                "first one stay at the parameters: change its param_groups, or build model, optimizer and compressor "
                "anew"
            )

    def register(self, model: object) -> None:
        """Raise TypeError: this is the compressor for Horovod, where DistributedDataParallel needs its own."""
        raise TypeError(
            "this Compression is for hvd.DistributedOptimizer. For DistributedDataParallel: from hvd_sparse.torch.ddp "
            "import Compression"
        )

    def _start_all_checks(self) -> None:
        """Start comparing settings of all compressors at once: their first uses may come in any order."""
        self._check_optimizer()
        if any(one is not self and one._check.is_to_start() for one in list(_compressors)):
            gc.collect()  # one that nothing uses any more may be there on some ranks only
        for compressor in list(_compressors):
            compressor._start_check()

    def _begin(self) -> None:
        self._began = [*self._began[1:], next(_clock)]
        is_on_time = self._steps_off == 0 and not is_late(monotonic() - self._ended_at)
        self._step.sends_early = runs_backward() and self._is_alone() and is_on_time
        self._steps_off = max(0, self._steps_off - 1)
        super()._begin()

    def _is_alone(self) -> bool:
        """Return whether no other compressor has begun a step since this one began its last but one.

        With several compressors, ranks may begin their steps in different orders, so none sends early. Some ranks may
        still have one that nothing uses any more: the presence sum tells all ranks whether each of them sends early.
        """
        return all(one is self or one._began[-1] <= self._began[0] for one in list(_compressors))

    def _stop_sending_early(self) -> None:
        """Send nothing more in backward, in this step and some of the next ones: a rank has no gradient, or is late."""
        self._step.sends_early = False
        self._steps_off = STEPS_AFTER_A_WAIT << min(self._waits_in_vain, 6)
        self._waits_in_vain += 1
        warn(WAITED_IN_VAIN.format(ANSWER_SECONDS, self._steps_off))

    def _finish(self) -> None:
        self._ended_at = monotonic()
        self._gradient_checks.check(calling_optimizer(self), self._step.arrivals)
        super()._finish()
        self._weights_check.compare()  # all ranks are in this step, and no optimizer has stepped
        if not self._overflowed:  # a loss scaler skips the optimizer's step after an overflow
            # Here, not in `_end`: of several optimizers with one backward pass, the first steps before that.
            self._optimizer_checks.after_reduction(self._parameters[name] for name in self._step.arrivals)

    def _warn_of_sparse(self) -> None:
        """Warn once of a sparse gradient, which Horovod does not give to `compress`."""
        if not self._has_warned_of_sparse and self._collectives.is_first():
            warn(not_compressed("a sparse gradient, as of Embedding(sparse=True),", self.algorithm))
        self._has_warned_of_sparse = True

    def _drop(self) -> None:
        """Forget the step under way."""
        super()._drop()
        self._open.clear()
        self._references.clear()

    def _end(self) -> None:
        self._references.clear()
        super()._end()

    def _units(self) -> Units:
        """Return the units of the step that begins, from the `op` of the optimizer that reduces the gradients."""
        optimizer, size = calling_optimizer(self), self._exchange.size()
        if optimizer is None:
            if self.algorithm.depends_on_reduction:
                raise ValueError(REDUCTION_UNKNOWN)
            return Units(size, None, self.loss_scale)
        if self._optimizers.note_use(optimizer):
            warn(
                "hvd_sparse: several optimizers use one compressor: each counts as a step, and sends payloads for the "
                "parameters of the others, too. Build a compressor for each, from its own named parameters"
            )
        if reduces_again(optimizer) and have_gradients(self._parameters.values()):
            raise RuntimeError(
                "hvd_sparse: optimizer.step() would reduce again what optimizer.synchronize() has reduced: residuals "
                "and momentum would count it twice. Write: with optimizer.skip_synchronize(): optimizer.step()"
            )
        self._averages = getattr(optimizer, "op", hvd.Average) == hvd.Average
        return Units(size, 1.0 / size if self._averages else 1.0, self.loss_scale)

    def _result(self, carried: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        gradient = arrival.gradient
        if self._overflowed:
            return torch.full_like(gradient, float("nan"))
        scale = self._reduction(carried) if arrival.carries_token else 1.0
        result = self._step.result(arrival, carried, scale)
        if result is gradient:
            return gradient
        result = result.to(gradient.dtype).view(gradient.shape)
        return result if gradient.is_contiguous() else torch.empty_like(gradient).copy_(result)  # keep its strides

    def _reduction(self, token: torch.Tensor) -> float:
        """Return the factor for sums: by the step's `op`, which a token must match; if it is unknown, the token's."""
        units = self._step.units
        scale = reduction_scale(token, units.world_size)
        expected = units.reduction
        if expected is None and units.world_size > 1:
            self._averages = scale < 1.0
        if expected is None:
            return scale
        if abs(scale - expected) > 1e-5 * expected:
            raise ValueError(reduction_differs(scale, expected))
        return expected

    def _check_optimizer(self) -> None:
        """Raise ValueError if the calling optimizer has another reduction than sum and mean, or another process set."""
        optimizer = calling_optimizer(self)
        if optimizer is None:
            return
        if getattr(optimizer, "op", hvd.Average) not in (hvd.Average, hvd.Sum):
            raise ValueError(f"hvd_sparse: {REDUCTIONS}, got op={optimizer.op}")
        theirs = getattr(optimizer, "process_set", self._collectives.process_set)
        self._collectives.check_process_set(theirs)


get_handler_registry().append((SparseCompressor, CompressionStateHandler))


class Compression(CompressionMethods[NamedParameters, SparseCompressor]):
    """The compressors, named like Horovod's `Compression`: `Compression.dgc(model.named_parameters(), ...)`.

    Pass the named parameters of the optimizer. Build one compressor per optimizer, in the same order on every rank.
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16

    @classmethod
    def _build(cls, algorithm: Algorithm, parameters, process_set) -> SparseCompressor:
        return SparseCompressor(algorithm, parameters, process_set)
