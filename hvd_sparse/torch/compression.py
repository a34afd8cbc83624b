"""`hvd.DistributedOptimizer(..., compression=Compression.dgc(...))`: what Horovod calls, on an unmodified Horovod.

`compress` starts a named allgather of the payload and hands Horovod a small token for its own allreduce; `decompress`
waits, sums the payloads of all ranks in rank order, and scales by what became of the token, so that op=Sum, Average
and gradient_predivide_factor mean what they always do.
"""

import threading
import warnings
import weakref
from collections.abc import Iterable

import horovod.torch as hvd
import torch
from horovod.torch.elastic.state import get_handler_registry

from hvd_sparse.algorithms import Algorithm, CompressionMethods
from hvd_sparse.log import Log
from hvd_sparse.members import is_elastic, two_momenta
from hvd_sparse.torch import exchange
from hvd_sparse.torch.caller import calling_optimizer
from hvd_sparse.torch.codecs.base import Entry
from hvd_sparse.torch.device import crossing
from hvd_sparse.torch.elastic import CompressionStateHandler
from hvd_sparse.torch.exchange import Exchange, Pending, incarnation
from hvd_sparse.torch.hierarchical import HierarchicalStep
from hvd_sparse.torch.parameters import Parameters
from hvd_sparse.torch.state import gather_state, restore_state
from hvd_sparse.torch.step import Step
from hvd_sparse.torch.tokens import REDUCTIONS, reduction_scale
from hvd_sparse.traffic import Traffic
from hvd_sparse.units import REDUCTION_UNKNOWN, Units, checked_loss_scale, reduction_differs

_compressors: weakref.WeakSet["SparseCompressor"] = weakref.WeakSet()
_checks_lock = threading.Lock()  # over the starts of configuration checks, of all compressors


class SparseCompressor:
    """A compressor with error feedback, for one optimizer; made by the methods of `Compression`.

    A gradient that is not finite on any rank skips the step on all ranks: every gradient becomes NaN (a loss scaler
    then skips its update), what is not finite counts as zero in the residual, and nothing else is lost.

    Args:
        algorithm: The settings of a method, from `hvd_sparse.algorithms`.
        named_parameters: (name, parameter) pairs, those of the optimizer.
        process_set: The optimizer's `hvd.ProcessSet`; None: all ranks.

    Raises:
        ValueError: Wrong arguments; and in the first step, on every rank, models or settings that differ between
            ranks, or a reduction other than Sum and Average.
        TypeError: Arguments of another type.
        RuntimeError: In a step: `hvd.join()`, ranks at different steps, damaged payloads.
    """

    def __init__(
        self, algorithm: Algorithm, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], process_set=None
    ):
        self.algorithm = algorithm
        self._parameters = Parameters(named_parameters)
        self._traffic = Traffic()
        self._exchange = Exchange(process_set, self._traffic)
        make = HierarchicalStep if getattr(algorithm, "exchange", "") == "hierarchical" else Step
        self._step = make(algorithm, self._parameters, self._exchange, self._traffic)
        self._crosses = self._parameters.device.type != self._step.device.type  # gradients do, and come back
        self._lock = threading.RLock()  # on CUDA, hooks run in autograd's threads
        self._number = 0  # of the step
        self._loss_scale = 1.0
        self._log: Log | None = None
        self._open: set[str] = set()  # compressed, not yet decompressed
        self._under_way = self._finished = self._overflowed = False
        self._agreed_in: object | None = None  # the incarnation of Horovod in which all ranks had the same settings
        self._reset_in: object | None = None  # the incarnation in which `reset` forgot that they had
        self._check: tuple[object, Pending | None] | None = None  # a configuration check, None if lost
        _compressors.add(self)
        self._start_check()
        if algorithm.local_momentum > 0.0 and self._exchange.is_alone():
            warnings.warn(
                "Horovod calls no compressor with one process: nothing is compressed, and the momentum of "
                f"Compression.{algorithm.name} is not applied. Give the optimizer a momentum for such a run",
                stacklevel=5,
            )
        if self._crosses and self._exchange.is_first() and not self._exchange.is_alone():
            warnings.warn(crossing(algorithm), stacklevel=5)

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Entry]:
        """Compress one gradient; return what Horovod is to all-reduce, and what `decompress` needs."""
        if torch.is_grad_enabled():  # not in a hook of autograd, where this is called for nearly every gradient
            with torch.no_grad():
                return self.compress(tensor)
        with self._lock:
            if self._agreed_in is not incarnation():
                self._agree()
            with self._traffic.timed("compress"):
                if not self._under_way or self._finished:
                    self._begin()
                step, parameters = self._step, self._parameters
                name = parameters.find(tensor, step.entries)
                if name in step.entries:  # the step was given up: its optimizer never stepped
                    self._begin()
                entry = Entry(name, tensor, not parameters[name].requires_grad)
                if self._crosses:
                    entry.gradient, entry.origin = tensor.to(step.device), tensor
                carried = step.add(entry)
                self._open.add(name)
                return carried, entry

    def decompress(self, tensor: torch.Tensor, ctx: Entry | None) -> torch.Tensor:
        """Return the reduced gradient, of the parameter's shape and type. Sparse gradients (ctx None) pass through."""
        if ctx is None:
            return tensor
        with self._lock:
            if self._step.entries.get(ctx.name) is not ctx:
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

    @property
    def loss_scale(self) -> float:
        """The loss scale, 1.0 at first: a number above 0, the same on every rank.

        Set it to `scaler.get_scale()` after each `scaler.update()`, before the next backward: a step reads it at its
        first gradient. clip_norm, weight_decay and a constant threshold are in units of the unscaled gradient, and so
        are residuals and thresholds: they stay as they are. See docs/mixed-precision.md.
        """
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        """Take the loss scale of the next step, a finite number above 0; TypeError or ValueError for anything else."""
        self._loss_scale = checked_loss_scale(value)

    def stats(self) -> dict:
        """Return what this rank has sent.

        Returns:
            {"steps": int, "step": last step, "total": all steps, "residual_norm": L2 norm of the residuals}. step and
            total hold dense_bytes (what Horovod alone would have sent), payload_bytes (what all collectives sent:
            payloads, dense tensors, tokens, votes; of a small step, whose payloads are rows of an all-reduce, the other
            ranks' rows of zeros, too), received_bytes (what came from other ranks), ratio, density
            (elements sent over all), and seconds {"compress", "exchange", "decompress"}. "dense_fallback" is what was
            chosen in the last step, and why: {"rule": the argument, "is_dense": whether all was sent dense because of
            it, "tensors": how many always are, "payload_bytes", "dense_bytes": what a rank receives either way;
            with "measured" also "payload_seconds", "dense_seconds": medians of the steps timed so far, or None}.
        """
        norms = [
            float(torch.linalg.vector_norm(feedback.buffers["residual"])) ** 2
            for feedback in self._step.feedback.values()
            if "residual" in feedback.buffers
        ]
        norm = sum(norms) ** 0.5
        return {**self._traffic.summary(), "residual_norm": norm, "dense_fallback": self._step.explain()}

    def log_to(self, writer, every: int = 1, prefix: str = "compression") -> None:
        """Report the numbers of each step to a logger: ratio, density, bytes, residual norm, seconds.

        Args:
            writer: A `SummaryWriter` of torch.utils.tensorboard, a writer of `tf.summary.create_file_writer`, or a
                function of a dict {name: number} and a step, such as `wandb.log` or `mlflow.log_metrics`. None: stop.
            every: Optimizer steps from one report to the next. The residual norm takes a pass over the residuals.
            prefix: The names are `{prefix}/ratio`, `{prefix}/density` and so on.

        Each rank reports its own numbers: call it on rank 0 alone, or on all with a writer each.

        Raises:
            TypeError: The writer is none of these.
            ValueError: `every` is below 1.
        """
        self._log = None if writer is None else Log(writer, every, prefix)

    def state_dict(self, summed: bool = False) -> dict:
        """Return the step number, residuals, velocities and thresholds; call it between optimizer steps.

        Args:
            summed: False: this rank's own state. With the same world size, and each rank from its own file, training
                continues bit for bit as if it had not been interrupted. True: the sum over all ranks, the same on each
                (call it on every rank). Any world size continues from that one file; thresholds start anew.

        Returns:
            A dictionary of copies, for `torch.save`.
        """
        return gather_state(self._step, self._number, self._exchange, summed)

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict()`; call it on every rank, between optimizer steps.

        Args:
            state: What `state_dict` returned. A summed one is divided among the ranks.

        Raises:
            ValueError: On any rank the state belongs to other parameters or another method, has NaN or infinity in a
                buffer, or is one rank's own and the world size has changed. Raised on every rank (but in an elastic
                job), before anything has changed.
        """
        with self._lock:
            self._number = restore_state(self._step, state, self._exchange)
            self._drop()

    def reset(self) -> None:
        """Start anew, on every rank: no residual, step 0, nothing pending, settings unchecked. The loss scale stays."""
        with self._lock:
            for feedback in self._step.feedback.values():
                for buffer in feedback.buffers.values():
                    buffer.zero_()
            self._number = 0
            self._traffic.restart()
            self._drop()
            self._step.forget()
            self._reset_in, self._agreed_in = self._agreed_in or self._reset_in, None

    def _agree(self) -> None:
        """Compare settings with all ranks: before the first step, and again after each reset of an elastic job.

        Ranks that a reset has added expect nothing of their first step, and start at step 0: the others expect nothing
        either, and all go on from the furthest step. Residuals stay.
        """
        self._exchange.size()  # raises if Horovod is not initialised
        self._check_optimizer()
        # Of all compressors at once, so that the order in which they are first used may differ between ranks.
        for compressor in list(_compressors):
            compressor._start_check()
        if self._check is None:
            raise RuntimeError("hvd_sparse: this rank is not in the process_set of the compression that it calls")
        now, pending = self._check
        if pending is None:
            raise RuntimeError(
                "hvd_sparse: hvd.init() was called again, without hvd.shutdown(), while ranks compared the settings of "
                "this compression, and Horovod lost the answer. Call it once, before compressions are built"
            )
        if self._reset_in is now:
            self._exchange.announce()
            gathered = self._exchange.wait_between_steps(pending, exchange.AGREE_SECONDS)
        else:
            gathered = pending.wait_at_most(exchange.AGREE_SECONDS)
        self._reset_in = None
        if self._agreed_in is not None:
            self._drop()
            self._step.forget()
        with _checks_lock:
            self._check, self._agreed_in = None, now
        try:
            furthest = self._exchange.agree(gathered, self._description())
        except ValueError:
            self._agreed_in = None
            raise
        if is_elastic():
            self._number = max(self._number, furthest)

    def _start_check(self) -> None:
        """Start comparing settings with all ranks, unless that is in flight, or done since Horovod was started."""
        with _checks_lock:
            now = incarnation()
            is_started = self._check is not None and self._check[0] is now
            if is_started or self._agreed_in is now or not self._exchange.can_start():
                return
            try:
                self._check = now, self._exchange.start_check(self._description(), self._number)
            except ValueError:  # the name is in use: Horovod still runs, and hvd.init() has dropped what was in flight
                if self._check is None:
                    raise
                self._check = now, None

    def _description(self) -> list[str]:
        return [*self.algorithm.describe(), *self._parameters.describe(), *self._step.describe()]

    def _begin(self) -> None:
        self._drop()
        self._parameters.restart()
        self._step.begin(self._number, self._units())
        self._under_way, self._finished = True, False

    def _units(self) -> Units:
        """Return the units of the step that begins; whoever reduces its gradients tells by its op."""
        optimizer, size = calling_optimizer(self), self._exchange.size()
        if optimizer is None:
            if self.algorithm.depends_on_reduction:
                raise ValueError(REDUCTION_UNKNOWN)
            return Units(size, None, self._loss_scale)
        average = getattr(optimizer, "op", hvd.Average) == hvd.Average
        return Units(size, 1.0 / size if average else 1.0, self._loss_scale)

    @torch.no_grad()
    def _finish(self) -> None:
        with self._traffic.timed("compress"):
            self._step.finish()
        with self._traffic.timed("exchange"):
            self._overflowed = self._step.overflowed()
        self._finished = True

    @torch.no_grad()
    def _end(self) -> None:
        self._step.end()
        self._traffic.end_step()
        self._number += 1
        self._under_way = False
        if self._log is not None:
            self._log.report(self.stats, self._number)

    def _drop(self) -> None:
        """Give up the step under way."""
        self._step.entries = {}
        self._open.clear()
        self._traffic.drop_step()
        self._under_way = self._finished = False

    def _result(self, carried: torch.Tensor, entry: Entry) -> torch.Tensor:
        gradient = entry.gradient
        if self._overflowed:
            return gradient.new_full(gradient.shape, float("nan"))
        scale = self._reduction(carried) if entry.carries_token else 1.0
        result = self._step.result(entry, carried, scale)
        return gradient if result is gradient else result.to(gradient.dtype).view(gradient.shape)

    def _reduction(self, token: torch.Tensor) -> float:
        """Return what became of a token, which must be what op said at the beginning of the step."""
        units = self._step.units
        scale = reduction_scale(token, units.world_size)
        told = units.reduction
        if told is not None and abs(scale - told) > 1e-5 * told:
            raise ValueError(reduction_differs(scale, told))
        return scale

    def _check_optimizer(self) -> None:
        """Look at the optimizer that calls: refuse other reductions, warn of a second momentum."""
        optimizer = calling_optimizer(self)
        if optimizer is None:
            return
        if getattr(optimizer, "op", hvd.Average) not in (hvd.Average, hvd.Sum):
            raise ValueError(f"hvd_sparse: {REDUCTIONS}, got op={optimizer.op}")
        theirs = getattr(optimizer, "process_set", self._exchange.process_set)
        self._exchange.check_process_set(theirs)
        outer = max((group.get("momentum", 0.0) or 0.0 for group in optimizer.param_groups), default=0.0)
        if self.algorithm.local_momentum > 0.0 and outer > 0.0 and self._exchange.rank() == 0:
            warnings.warn(two_momenta(outer, self.algorithm.name, self.algorithm.local_momentum), stacklevel=4)


get_handler_registry().append((SparseCompressor, CompressionStateHandler))


class Compression(CompressionMethods[Iterable[tuple[str, torch.nn.Parameter]], SparseCompressor]):
    """The compressors, under the names that Horovod's own have: `Compression.dgc(model.named_parameters(), ...)`.

    Give each method the named parameters of the optimizer, and build a compressor of its own for each optimizer, in the
    same order on every rank.
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16

    @classmethod
    def _build(cls, algorithm: Algorithm, parameters, process_set) -> SparseCompressor:
        return SparseCompressor(algorithm, parameters, process_set)
