"""The common part of the compressors for Horovod and DistributedDataParallel: settings, statistics, checkpoints."""

import abc
import hashlib
import threading
from typing import Protocol

import torch

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.frames import warn
from hvd_sparse.log import Logged
from hvd_sparse.messages import NOT_COPIED
from hvd_sparse.torch.codecs.base import Arrival
from hvd_sparse.torch.collectives import Collectives
from hvd_sparse.torch.configuration_check import ConfigurationCheck
from hvd_sparse.torch.device import crossing
from hvd_sparse.torch.exchange import Exchange
from hvd_sparse.torch.hierarchical import HierarchicalStep
from hvd_sparse.torch.norm import sum_of_squares
from hvd_sparse.torch.optimizer_checks import OptimizerChecks
from hvd_sparse.torch.optimizer_step import OptimizerStep
from hvd_sparse.torch.parameters import NamedParameters, Parameters
from hvd_sparse.torch.state import gather_state, restore_state
from hvd_sparse.torch.step import Step
from hvd_sparse.torch.traffic import Traffic
from hvd_sparse.traffic import CompressionStats
from hvd_sparse.units import Units, checked_loss_scale

WITHIN_A_STEP = (
    "hvd_sparse: state_dict() between backward and optimizer.step(): the state has gradients that are not sent yet. If "
    "this batch is trained again from it, they count twice. Call it between optimizer steps"
)
GIVEN_UP_APART = (
    "hvd_sparse: the ranks give up a step in which they have compressed different gradients. Call "
    "optimizer.synchronize() on every rank before load_state_dict() or reset(), or start again from a checkpoint"
)


class Scaler(Protocol):
    """A loss scaler, such as `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """Return the factor of the loss."""


Scale = float | Scaler


class Compressor(Logged, abc.ABC):
    """A compressor with error feedback, for one optimizer: the common part of all backends."""

    def __init__(
        self,
        algorithm: Algorithm,
        parameters: NamedParameters,
        collectives: Collectives,
    ):
        self._parameters = Parameters(parameters)
        algorithm = algorithm.with_names(self._parameters.items())
        self.algorithm = algorithm
        self._traffic = Traffic()
        self._exchange = Exchange(collectives, self._traffic)
        kind = HierarchicalStep if algorithm.is_hierarchical else Step
        self._step: OptimizerStep = kind(algorithm, self._parameters, self._exchange, self._traffic)
        self._crosses = self._parameters.device.type != self._step.device.type  # gradients, and sums back
        self._lock = threading.RLock()  # on CUDA, hooks run in autograd's threads
        self._number = 0  # of the step
        self._averages = True  # whether results are means over ranks, as in the last step
        self._optimizer_checks = OptimizerChecks(algorithm, self._parameters.values(), collectives)
        self._loss_scale: Scale = 1.0
        self._under_way = self._has_sent = self._finished = self._overflowed = False
        self._check = ConfigurationCheck(self._exchange)
        if self._crosses and collectives.is_first() and not collectives.is_alone():
            warn(crossing(algorithm, self._parameters.device, collectives))

    def __reduce__(self):
        raise TypeError(NOT_COPIED)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, step {self._number}: {self.algorithm}>"

    @property
    def loss_scale(self) -> float:
        """The loss scale, 1.0 at first: a number above 0, the same on every rank.

        Set it once, to the loss scaler, which has `get_scale()` as `torch.amp.GradScaler` has: each step reads its
        scale at the first gradient. Or set it to a number before each backward. clip_norm, weight_decay, residuals and
        thresholds are in units of the unscaled gradient, and do not change with the scale. See docs/mixed-precision.md.
        """
        scale = self._loss_scale
        return scale if isinstance(scale, float) else checked_loss_scale(scale.get_scale())

    @loss_scale.setter
    def loss_scale(self, value: Scale) -> None:
        """Take a loss scaler, or a finite number above 0; TypeError or ValueError for anything else."""
        self._loss_scale = value if hasattr(value, "get_scale") else checked_loss_scale(value)
        self._optimizer_checks.is_scaled = True

    def stats(self) -> CompressionStats:
        """Return what this rank has sent.

        Returns:
            {"steps": int, "skipped": how many of them, as a gradient was not finite on some rank, "step": last step,
            "total": all steps, "residual_norm": L2 norm of the residuals}. step and total have dense_bytes (without
            compression), payload_bytes (sent by all collectives: payloads, dense tensors, tokens, votes; in a small
            step, whose payloads are rows of an all-reduce, also the zeros in other ranks' rows), received_bytes (from
            other ranks), ratio, density (elements sent / all elements), and seconds {"compress", "exchange",
            "decompress"}. "dense_fallback" is the choice in the last step, and the reason: {"rule": the argument,
            "is_dense": whether it sent all gradients dense, "tensors": number of tensors that are always dense,
            "payload_bytes", "dense_bytes": bytes that a rank receives either way in a step with all gradients, with
            those tensors dense in both, unless all are; with "measured" also "payload_seconds", "dense_seconds":
            medians of the steps timed so far, or None}.
        """
        buffers = [feedback.buffers for feedback in self._step.feedback.values()]
        norm = sum(sum_of_squares(one["residual"]) for one in buffers if "residual" in one) ** 0.5
        return {
            **self._traffic.summary(),
            "skipped": self._traffic.skipped,
            "residual_norm": norm,
            "dense_fallback": self._step.explain(),
        }

    @torch.inference_mode(False)  # training and collectives change the tensors, wherever they were made
    def state_dict(self, summed: bool = False) -> dict:
        """Return the step number, residuals, velocities and thresholds; call it between optimizer steps.

        Args:
            summed: False: this rank's state. If each rank loads its state, at the same world size, training continues
                bit for bit as without interruption (exceptions: docs/training-loops.md). True: the sum over all ranks,
                the same on each (call it on every rank). Any world size can load this sum; thresholds start anew.

        Returns:
            A dictionary of copies, for `torch.save`; `hvd_sparse.checkpoint` has its layout.

        Raises:
            RuntimeError: With `summed`: another rank is in a step, or did not call within 600 s (the environment
                variable HVD_SPARSE_TIMEOUT).
        """
        if self._under_way and self._exchange.collectives.is_first():
            warn(WITHIN_A_STEP)
        return gather_state(self._step, self._number, self._exchange, summed, self._averages)

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict()`; call it on every rank, between optimizer steps.

        Args:
            state: A result of `state_dict`. The ranks divide a summed state, so that residuals change the weights
                as they would have: with op=Average their mean is that of the ranks that saved it. Names of parameters
                may have a path in front that they did not have, such as "module." or "_orig_mod.", or lack it.

        Raises:
            ValueError: On any rank the state belongs to other parameters or another method, lacks buffers that it had
                when it was saved, has NaN or infinity in a buffer, or is not summed and the world size has changed.
                Raised on every rank (except in an elastic job), before anything has changed.
            RuntimeError: Another rank is in a step, or did not call within 600 s.
        """
        with self._lock:
            self._give_up()
            self._optimizer_checks.forget_reductions()
            self._number = restore_state(self._step, state, self._exchange)
            self._averages = state.get("averages", True)

    @torch.inference_mode(False)
    def reset(self) -> None:
        """Clear residuals, step number, statistics and the step under way, on every rank; check settings again.

        Keep the loss scale.

        Raises:
            RuntimeError: A step is under way, and another rank did not call within 600 s, or has other gradients in it.
        """
        with self._lock:
            self._give_up()
            self._optimizer_checks.forget_reductions()
            for feedback in self._step.feedback.values():
                for buffer in feedback.buffers.values():
                    buffer.zero_()
            self._number = 0
            self._traffic.reset()
            self._step.forget_tensors()
            self._check.forget()
            self._start_check()  # here, where all ranks are: one may drop this compressor sooner than another

    def _check_configuration(self) -> None:
        """Compare settings with all ranks: before the first step, and again after each reset of an elastic job.

        Ranks that a reset has added expect nothing of their first step, and start at step 0: the others expect nothing
        either, and all go on from the furthest step. Residuals stay.
        """
        self._exchange.size()  # raises if the backend is not initialised
        self._parameters.check_device()
        self._start_all_checks()
        if self._check.has_passed:
            self._drop()
            self._step.forget_tensors()
        furthest = self._check.finish(self._description())
        if self._exchange.collectives.is_elastic():
            self._number = max(self._number, furthest)

    def _start_all_checks(self) -> None:
        """Start comparing settings, of this compressor at least."""
        self._start_check()

    def _start_check(self) -> None:
        """Start comparing settings with all ranks, unless that is in flight or done."""
        self._check.start(self._description(), self._number)

    def _description(self) -> list[str]:
        # Collectives on the CPU and on a GPU do not match: the ranks would wait for each other.
        where = f"gradients are compressed on {self._step.device.type}"
        return [*self.algorithm.describe(), where, *self._parameters.describe(), *self._step.describe()]

    def _arrival_of(self, name: str, gradient: torch.Tensor, frozen: bool) -> Arrival:
        """Return a gradient as the step takes it: on the device where it works."""
        if not self._crosses:
            return Arrival(name, gradient, frozen)
        return Arrival(name, gradient.to(self._step.device), frozen, origin=gradient)

    def _begin(self) -> None:
        """Begin a step."""
        self._give_up()
        units = self._units()
        self._optimizer_checks.begin_step(units.loss_scale)
        self._parameters.begin_step()
        self._step.begin(self._number, units)
        self._under_way, self._has_sent, self._finished = True, False, False

    @abc.abstractmethod
    def _units(self) -> Units:
        """Return the units of the step that begins."""

    @torch.no_grad()
    def _finish(self) -> None:
        with self._traffic.timed("compress"):
            self._has_sent = True
            self._step.finish()
        with self._traffic.timed("exchange"):
            self._overflowed = self._step.overflowed()
        self._finished = True

    @torch.no_grad()
    def _end(self) -> None:
        self._step.end()
        self._traffic.count(skipped=int(self._overflowed))
        self._traffic.end_step()
        self._number += 1
        self._under_way = False
        self._report(self.stats, self._number)

    def _give_up(self) -> None:
        """Give up the step under way, if any, which all ranks do: complete its exchange, and discard the result.

        If only some ranks have sent a message, it would be matched with the message of the same name in the next step.
        RuntimeError if the ranks have other gradients in the step, or one does not come.
        """
        if self._under_way and not self._check.is_due():  # else the backend was started anew, without the messages
            content = " ".join(sorted(self._step.arrivals)).encode()
            answers = self._exchange.meet("step", hashlib.sha256(content).hexdigest())
            if answers is not None and len(set(answers)) > 1:
                raise RuntimeError(GIVEN_UP_APART)
            if answers is not None:
                with torch.no_grad():
                    if not self._has_sent:
                        self._step.finish()
                    self._step.end(given_up=True)
        self._drop()

    def _drop(self) -> None:
        """Forget the step under way."""
        self._step.drop()
        self._traffic.drop_step()
        self._under_way = self._finished = False
