"""The base of compressors that exchange over a process group; `reduce_gradients` for loops without a DDP model."""

from collections.abc import Collection
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.futures import Future

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.announcement import MOST_RANKS
from hvd_sparse.checks import some
from hvd_sparse.torch.codecs.base import Arrival
from hvd_sparse.torch.collectives.distributed import DistributedCollectives
from hvd_sparse.torch.compressor import Compressor
from hvd_sparse.torch.dense_bucket import fills
from hvd_sparse.torch.exchange import Pending
from hvd_sparse.torch.optimizer_checks import TWO_PASSES
from hvd_sparse.torch.own_loop_checks import OwnLoopChecks
from hvd_sparse.torch.parameters import NamedParameters, gradient_dtype
from hvd_sparse.units import Units

TWO_REDUCTIONS = (
    "hvd_sparse: two calls of reduce_gradients() without an optimizer step between them: the second compresses "
    "gradients that were reduced already, and momentum grows without bound. To accumulate, run several backward passes "
    "and call it once"
)
SPARSE = (
    "hvd_sparse does not compress sparse gradients under DistributedDataParallel, or in reduce_gradients(): use "
    "embeddings with sparse=False"
)


class ArrivedBucket(NamedTuple):
    """A bucket of gradients of one dtype that have been added to the step."""

    buffer: torch.Tensor  # all of them, as DistributedDataParallel stores them; in reduce_gradients() the first
    future: Future[torch.Tensor]
    arrivals: list[Arrival]
    sizes: list[int]  # elements of the tensors sent dense, in the order of the arrivals that carry no token
    pending: Pending | None  # the all-reduce of these tensors, concatenated


class GroupCompressor(Compressor):
    """A compressor over a process group: gradients arrive in buckets of one dtype, and become means over its ranks."""

    def __init__(self, algorithm: Algorithm, parameters: NamedParameters, process_group: dist.ProcessGroup | None):
        self._collectives = DistributedCollectives(process_group)
        super().__init__(algorithm, parameters, self._collectives)
        self._collectives.device = self._parameters.device
        self._own_loop: OwnLoopChecks | None = None  # once reduce_gradients was called
        self._arrived: list[ArrivedBucket] = []
        self._arrived_names: set[str] = set()
        self._used: set[str] = set()  # parameters with a gradient since the last step

    @torch.no_grad()
    @torch.compiler.disable
    def reduce_gradients(self) -> None:
        """Replace each parameter's `grad` with the compressed mean over ranks: after backward, before the optimizer.

            loss.backward()
            compression.reduce_gradients()
            optimizer.step()

        For loops without DistributedDataParallel. Call it once a step, on every rank: each call is a step of the
        compressor. A parameter takes part if it has a gradient on any rank. A rank where its `grad` is None counts
        with zeros, sends nothing of its residual, and gets the mean, too; if it is None on all ranks, it stays so.

        If any rank has a gradient that is not finite, all gradients become NaN on all ranks. With a loss scaler, call
        it before `scaler.unscale_` and `scaler.step`.

        Raises:
            RuntimeError: This compressor is registered in a model. Ranks are at different steps.
            ValueError: No parameter has a gradient on any rank; a gradient is sparse; in the first step: settings
                differ between ranks. Every rank raises.
        """
        if self._is_registered():
            raise RuntimeError(
                "hvd_sparse: reduce_gradients() is for loops without DistributedDataParallel, but this compressor is "
                "registered in a model, whose backward pass reduces the gradients: leave it out, or build a compressor "
                "for it alone"
            )
        with self._lock:
            if self._check.is_due():
                self._check_configuration()
            start = perf_counter()
            names = self._with_gradients()
            waited, checks = perf_counter() - start, self._start_own_loop()
            with self._traffic.timed("compress"):
                self._open_step()
                self._traffic.count(payload_bytes=8 * len(self._parameters), exchange=waited)
                by_dtype: dict[torch.dtype, list[str]] = {}
                for name in names:
                    by_dtype.setdefault(gradient_dtype(self._parameters[name]), []).append(name)
                for own in by_dtype.values():
                    self._take_own(own)
            self._deliver()
            checks.after_reduction(self._parameters[name] for name in names)

    def _start_own_loop(self) -> OwnLoopChecks:
        """Return the checks of a loop that reduces its gradients itself, made at the first call."""
        if self._own_loop is None:
            self._own_loop = OwnLoopChecks(self._parameters.values(), self._exchange.collectives, self._number)
            self._optimizer_checks.own_loop = self._own_loop.before_step
        return self._own_loop

    def _refuse_own_loop(self) -> None:
        """Raise ValueError if reduce_gradients was called: its step numbers and residuals are those of that loop."""
        if self._own_loop is not None:
            raise ValueError(
                "this compressor reduces gradients by reduce_gradients() already: build a new one for the model, "
                f"Compression.{self.algorithm.name}(model.named_parameters(), ...)"
            )

    def _with_gradients(self) -> list[str]:
        """Return the parameters that have a gradient on any rank, in order; ValueError if one is sparse, or none has.

        Each rank adds 1 for a gradient, and MOST_RANKS for a sparse one.
        """
        own = [parameter.grad for parameter in self._parameters.values()]
        numbers = [0 if one is None else MOST_RANKS if one.is_sparse else 1 for one in own]
        sums = self._exchange.allreduce("given", torch.tensor(numbers, device="cpu"), counted=False).wait().tolist()
        by_name = dict(zip(self._parameters, sums, strict=True))
        if sparse := [name for name, total in by_name.items() if total >= MOST_RANKS]:
            raise ValueError(f"{SPARSE}; sparse on at least one rank: {some(sparse)}")
        names = [name for name, total in by_name.items() if total > 0]
        if not names:
            raise ValueError(
                "hvd_sparse: reduce_gradients() found no gradient on any rank: call it after backward(), and before "
                "zero_grad()"
            )
        return names

    def _take_own(self, names: list[str]) -> None:
        """Add the gradients of these parameters, of one dtype, to the step."""
        missing, gradients = set(), []
        for name in names:
            parameter = self._parameters[name]
            if parameter.grad is None:
                missing.add(name)
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            elif 0 in parameter.grad.stride():  # an expanded tensor, which cannot hold the mean
                parameter.grad = torch.empty_like(parameter, dtype=parameter.grad.dtype).copy_(parameter.grad)
            gradients.append(parameter.grad.detach())
        self._used.update(set(names) - missing)
        self._take(gradients[0], names, gradients, missing)

    def _is_registered(self) -> bool:
        """Return whether a model reduces the gradients, in its backward pass."""
        return False

    def _open_step(self) -> None:
        """Begin a step."""
        if self._check.is_due():
            self._check_configuration()
        self._arrived, self._arrived_names = [], set()
        self._begin()

    def _take(
        self, buffer: torch.Tensor, names: list[str], gradients: list[torch.Tensor], unused: Collection[str]
    ) -> Future[torch.Tensor]:
        """Add gradients of one dtype to the step, and start the all-reduce of tensors that are sent dense."""
        arrivals, sums, future = [], [], Future(devices=[buffer.device] if buffer.is_cuda else [])
        for name, gradient in zip(names, gradients, strict=True):
            arrival = self._arrival_of(name, gradient, name in unused)
            if arrival.frozen and arrival.origin is None:  # sums go there, and this one may stay
                arrival = Arrival(name, gradient.clone(), True, origin=gradient)
            carried = self._step.add(arrival)
            arrivals.append(arrival)
            if not arrival.carries_token:
                sums.append(carried.reshape(-1))
        pending = self._start_sum(f"ddp.{len(self._arrived)}", buffer, sums) if sums else None
        self._arrived.append(ArrivedBucket(buffer, future, arrivals, [one.numel() for one in sums], pending))
        self._arrived_names.update(names)
        return future

    def _start_sum(self, name: str, buffer: torch.Tensor, sums: list[torch.Tensor]) -> Pending:
        """Start one all-reduce that sums tensors, [n] each: in place, if it is one or if they fill the buffer."""
        one = sums[0] if len(sums) == 1 else buffer if fills(buffer, sums) else None
        whole = torch.cat(sums) if one is None else one
        if whole.dtype == torch.float16:  # the sum may overflow float16, the mean does not
            whole.mul_(1.0 / self._exchange.size())
        return self._exchange.allreduce(name, whole, counted=False)  # `Step.add` has counted it

    def _deliver(self) -> None:
        """Finish the step: write the mean over all ranks to the buckets."""
        unused = self._start_unused()
        self._finish()
        scale, kept = 1.0 / self._exchange.size(), self._unused_everywhere(unused)
        for arrived in self._arrived:
            if arrived.pending is not None:
                with self._traffic.timed("exchange"):
                    total = arrived.pending.wait()
            with self._traffic.timed("decompress"):
                if self._overflowed:
                    for arrival in arrived.arrivals:
                        if arrival.name not in kept:
                            arrival.passed.fill_(float("nan"))
                    continue
                means = []
                if arrived.pending is not None:
                    total = total if total.dtype == torch.float16 else total.mul_(scale)
                    means = list(total.split(arrived.sizes))
                self._put(arrived.arrivals, means, scale, kept)
        self._end()
        if not self._overflowed:  # a loss scaler skips the optimizer's step after an overflow
            used = [self._parameters[name] for name in self._used]  # none on a rank that has left its loop in `Join`
            self._optimizer_checks.check_reduction(used, TWO_PASSES if self._is_registered() else TWO_REDUCTIONS)
            self._optimizer_checks.after_reduction(used)
        for arrived in self._arrived:
            arrived.future.set_result(arrived.buffer)
        self._arrived, self._arrived_names = [], set()
        self._used.clear()

    def _put(self, arrivals: list[Arrival], means: list[torch.Tensor], scale: float, kept: set[str]) -> None:
        """Write the reduced gradients to the bucket, but for `kept`. means: of the tensors sent dense, in order."""
        dense = iter(means)
        for arrival in arrivals:
            carried = arrival.gradient if arrival.carries_token else next(dense)
            place, result = arrival.passed, self._step.result(arrival, carried, scale)
            if arrival.name not in kept and result.data_ptr() != place.data_ptr():
                place.copy_(result.view(place.shape))

    def _start_unused(self) -> Pending | None:
        """Start to count the ranks that use each parameter; None: every `grad` is replaced."""
        return None

    def _unused_everywhere(self, unused: Pending | None) -> set[str]:
        """Return the parameters whose `grad` must stay, as no rank has used them."""
        if unused is None:
            return set()
        with self._traffic.timed("exchange"):
            counts = unused.wait().tolist()
        return {name for name, count in zip(sorted(self._arrived_names), counts, strict=True) if count == 0.0}

    def _units(self) -> Units:
        """Return the units of the step that begins: results are means of gradients."""
        size = self._exchange.size()
        return Units(size, 1.0 / size, self.loss_scale)
