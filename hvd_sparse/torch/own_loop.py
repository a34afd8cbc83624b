"""Reduces gradients that are computed already, in loops without DistributedDataParallel and Horovod's optimizer."""

import abc
from collections.abc import Collection
from time import perf_counter

import torch

from hvd_sparse.announcement import MOST_RANKS
from hvd_sparse.checks import some
from hvd_sparse.torch.compressor import Compressor
from hvd_sparse.torch.own_loop_checks import OwnLoopChecks

TWO_REDUCTIONS = (
    "hvd_sparse: two calls of reduce_gradients() without an optimizer step between them: the second compresses "
    "gradients that were reduced already, and momentum grows without bound. To accumulate, run several backward passes "
    "and call it once"
)
SPARSE = (
    "hvd_sparse does not compress sparse gradients under DistributedDataParallel, or in reduce_gradients(): use "
    "embeddings with sparse=False"
)


class OwnLoop(Compressor):
    """The part of a DDPCompressor that reduces the gradients of a loop without DistributedDataParallel."""

    _own_loop: OwnLoopChecks | None = None  # once reduce_gradients was called
    _used: set[str]  # parameters with a gradient on this rank

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
                    by_dtype.setdefault(self._parameters[name].dtype, []).append(name)
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
                parameter.grad = torch.zeros_like(parameter)
            elif 0 in parameter.grad.stride():  # an expanded tensor, which cannot hold the mean
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
            gradients.append(parameter.grad.detach())
        self._used.update(set(names) - missing)
        self._take(gradients[0], names, gradients, missing)

    @abc.abstractmethod
    def _is_registered(self) -> bool:
        """Return whether a model reduces the gradients."""

    @abc.abstractmethod
    def _open_step(self) -> None:
        """Begin a step."""

    @abc.abstractmethod
    def _take(
        self, buffer: torch.Tensor, names: list[str], gradients: list[torch.Tensor], unused: Collection[str]
    ) -> object:
        """Add gradients of one dtype to the step."""

    @abc.abstractmethod
    def _deliver(self) -> None:
        """Finish the step: write the means over all ranks to the gradients."""
