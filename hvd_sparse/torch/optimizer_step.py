"""What a compressor asks of the code that runs its optimizer steps: `Step`, or with hosts `HierarchicalStep`."""

import abc
from collections.abc import Mapping

import torch

from hvd_sparse import weight_decay
from hvd_sparse.algorithms import Algorithm
from hvd_sparse.torch.codecs.base import Arrival
from hvd_sparse.torch.error_feedback import ErrorFeedback, StatePart
from hvd_sparse.torch.exchange import Exchange, Pending
from hvd_sparse.torch.parameters import Parameters
from hvd_sparse.torch.presence import Presence
from hvd_sparse.torch.tokens import Tokens
from hvd_sparse.torch.traffic import Traffic
from hvd_sparse.traffic import DenseFallbackStats
from hvd_sparse.units import Units


class OptimizerStep(abc.ABC):
    """Runs the optimizer steps of one compressor, one at a time.

    In each step all ranks call, in this order: `begin`; `add` for each gradient, in any order; `finish`; `overflowed`;
    unless that returned true, `result` for each gradient; `end`. To give up a step, all call `finish`, if they have
    not, and `end(given_up=True)`; `drop` gives it up on this rank alone.

    Args:
        algorithm: The settings of the method.
        parameters: The parameters, by name.
        exchange: The exchange between all ranks of the compressor.
        traffic: Counts what is sent.
    """

    device: torch.device  # of the error feedback
    shard: int | None = None  # the number of this rank's shard of the parameters; None: it has no shard, or all of them
    has_state = True  # whether this rank's error feedback is known
    sends_early = True  # whether this rank can send messages that need all ranks before `finish`
    feedback: Mapping[str, ErrorFeedback]  # of this rank, by the name of the parameter
    thresholds: Mapping  # by name; they persist across steps and are part of a checkpoint
    regions: dict  # of reduce-scatters, by the tensors of their messages; part of a checkpoint
    units: Units  # of the step under way
    _presence: Presence  # the presence check of the step under way

    def __init__(self, algorithm: Algorithm, parameters: Parameters, exchange: Exchange, traffic: Traffic):
        self.algorithm, self.parameters, self.exchange, self.traffic = algorithm, parameters, exchange, traffic
        self.arrivals: dict[str, Arrival] = {}  # the gradients of the step under way
        self.expected: tuple[str, ...] = ()  # the tensors of the last step that was not given up
        self._weight_decays = algorithm.weight_decays(parameters.items())
        self._clips_model = algorithm.clips == "model"
        self._tokens = Tokens()
        self._in_flight: list[Pending] = []  # collectives that the step has started

    def describe(self) -> list[str]:
        """Return one line for each parameter with weight decay, for the configuration check across ranks."""
        return weight_decay.describe(self._weight_decays)

    @abc.abstractmethod
    def state_parts(self, summed: bool) -> dict[str, StatePart]:
        """Return the checkpoint entry of each parameter. summed: of a state that is the sum over all ranks."""

    @abc.abstractmethod
    def forget_tensors(self) -> None:
        """Make the next step expect no tensors, as the first one does; keep the error feedback."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Reset what persists across steps, but for the error feedback and the expected tensors."""

    @abc.abstractmethod
    def explain(self) -> DenseFallbackStats:
        """Return the entry of `stats` on the last step's choice between payloads and dense tensors."""

    @abc.abstractmethod
    def begin(self, number: int, units: Units) -> None:
        """Begin an optimizer step, counted from 0."""

    @abc.abstractmethod
    def add(self, arrival: Arrival) -> torch.Tensor:
        """Add one gradient to the step; return the tensor for Horovod to all-reduce: a token or the dense tensor."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Send what is left of the step; no gradient is added after this."""

    @abc.abstractmethod
    def overflowed(self) -> bool:
        """Return whether any gradient on any rank was not finite: then the step is skipped. Waits for all ranks.

        RuntimeError on every rank if the ranks are at different steps, or if one found a damaged payload in the last.
        """

    @abc.abstractmethod
    def result(self, arrival: Arrival, carried: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the reduced gradient, float32[n] or in the gradient's own shape and dtype.

        carried: the tensor that Horovod reduced. scale: the factor for sums over ranks.
        """

    @abc.abstractmethod
    def end(self, given_up: bool = False) -> None:
        """End a step; unless all ranks give it up, the next step expects the same tensors.

        Waits for collectives that were left unread.
        """

    def has_waited_in_vain(self) -> bool:
        """Return whether `add` has waited for the ranks to begin the step, and not all have: nothing is sent early."""
        return self._presence.has_waited_in_vain

    @abc.abstractmethod
    def drop(self) -> None:
        """Give up the step under way."""

    def _wait_for_unread(self) -> None:
        """Wait for collectives that a skipped step has left unread, as Horovod holds their tensors; drop all."""
        for collective in self._in_flight:
            collective.wait()
        self._in_flight = []
        self._tokens.end()
