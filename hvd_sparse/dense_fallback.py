"""The dense fallback: gradients are sent dense where this costs fewer bytes than payloads.

It applies to whole steps, as at the start of a warm-up, and to small tensors. The rule compares the bytes that a rank
receives: in an all-gather, the payloads of the N - 1 other ranks; in a ring all-reduce of m bytes, 2 m (N - 1) / N.
Without the common factor (N - 1) / N, it compares N payloads (in a reduce-scatter, 2) with twice the gradient. With
dense_fallback="measured", a step for which payloads cost fewer bytes is also sent dense if this takes less time
(`hvd_sparse.trials`).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.algorithms.base import AtDensity
from hvd_sparse.checks import checked_density
from hvd_sparse.granularity import segments_of
from hvd_sparse.schedule import Constant
from hvd_sparse.traffic import DenseFallbackStats
from hvd_sparse.trials import Trials
from hvd_sparse.wire import HEADER_BYTES, payload_size, top_k_count

FLOAT32_BYTES = 4
MOST_DRIFT = 1.5  # payloads are timed anew when the density has changed by more than this factor


class TensorSize(NamedTuple):
    """A parameter's shape and the bytes of a gradient element, which is sent with at least 4 bytes (float32)."""

    shape: Sequence[int]
    itemsize: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(map(int, self.shape))


class DenseFallback:
    """The rule for the tensors of one compressor at one world size; all ranks decide the same.

    tensors: the tensors that the method would send as payloads, by name. one_by_one: whether a step with payloads may
    send some tensors dense.
    """

    def __init__(
        self, algorithm: Algorithm, tensors: Mapping[str, TensorSize], world_size: int, one_by_one: bool = True
    ):
        self.algorithm = algorithm
        self.world_size = world_size
        self._one_by_one = one_by_one
        self._tensors = dict(tensors)
        self._numels = [tensor.numel for tensor in self._tensors.values()]
        self._settled = algorithm.schedule.settled
        self._decided = (1.0, False)  # the last density, and whether payloads cost more
        self._chosen: dict[int, bool] = {}  # by step, for the last two: was it sent dense?
        self.reset()

    def sends_dense(self, density: float) -> bool:
        """Return whether a step at this density is dense: the density is 1, or payloads cost more bytes together.

        Tensors that are always sent dense do not count, unless all are.
        """
        known, costs_more = self._decided
        if density != known:
            costs_more = self._costs_more(self._compared, density)
            self._decided = density, costs_more
        return costs_more or density >= 1.0

    def choose(self, number: int, density: float) -> float:
        """Return the density of a step, counted from 0: the schedule's, or 1.0 if dense is cheaper or faster."""
        density = checked_density("the schedule's density", density)
        is_dense = self.sends_dense(density)
        if self.is_measured and not is_dense:
            if not 1.0 / MOST_DRIFT <= density / self._tried_density <= MOST_DRIFT:
                self._trials, self._tried_density = self._trials.at_other_density(), density
            is_dense = self._trials.is_dense
        self._chosen = {step: way for step, way in self._chosen.items() if step == number - 1}
        self._chosen[number] = is_dense
        return 1.0 if is_dense else density

    def note(self, number: int, seconds: float) -> None:
        """Record the duration of step `number - 1`, from its beginning to that of `number`: the mean over ranks."""
        is_dense = self._chosen.get(number - 1)
        if is_dense is not None and seconds > 0.0:
            self._trials.note(is_dense, seconds)

    def reset(self) -> None:
        """Restart the timing of both ways."""
        self._trials, self._chosen = Trials(), {}
        self._tried_density = self.algorithm.schedule.planned  # where the trials began: all ranks begin alike

    @property
    def is_measured(self) -> bool:
        """Whether steps are timed."""
        return self.is_on and self.algorithm.dense_fallback == "measured"

    @functools.cached_property
    def always(self) -> frozenset[str]:
        """The tensors that are sent dense in every step: their payloads cost more even at the final density."""
        if not self.is_on or self._settled is None or not self._one_by_one:
            return frozenset()
        settled, names, dense = self._settled, tuple(self._tensors), frozenset()
        if self.algorithm.selection in ("tensor", "threshold"):  # others share a payload
            dense = frozenset(name for name in names if self._costs_more((name,), settled, shares=True))
        if isinstance(self.algorithm.schedule, Constant):  # others may cost more than dense together
            others = tuple(name for name in names if name not in dense)
            dense = frozenset(names) if self._costs_more(others, settled) else dense
        return dense

    @functools.cached_property
    def _compared(self) -> tuple[str, ...]:
        """The tensors that are sent as payloads in some steps; if there are none, all."""
        return tuple(name for name in self._tensors if name not in self.always) or tuple(self._tensors)

    @property
    def is_on(self) -> bool:
        """Whether the rule applies: it is enabled, the method has a density, and there are ranks and tensors."""
        if self.algorithm.dense_fallback is None or not isinstance(self.algorithm, AtDensity):
            return False
        return self.world_size > 1 and bool(self._tensors)

    def explain(self, number: int, density: float) -> DenseFallbackStats:
        """Return the entry of `stats` for a step at the schedule's density: the choice, and the cost of both ways."""
        names, compared = tuple(self._tensors), self._compared
        payloads = self._payload_bytes(compared, density) if names else 0
        others = self._dense_bytes([name for name in names if name not in compared])
        factor, is_all = (self.world_size - 1) / self.world_size, 0 < len(names) == len(self.always)
        entry: DenseFallbackStats = {
            "rule": self.algorithm.dense_fallback,
            "is_dense": is_all or self._chosen.get(number, self.sends_dense(density)),
            "tensors": len(self.always),
            "payload_bytes": round(factor * (payloads + others)),
            "dense_bytes": round(factor * self._dense_bytes(names)),
        }
        if self.is_measured:
            entry |= {"payload_seconds": self._trials.seconds(False), "dense_seconds": self._trials.seconds(True)}
        return entry

    @staticmethod
    def unused(algorithm: Algorithm) -> DenseFallbackStats:
        """Return the entry of `stats` before the first step."""
        entry: DenseFallbackStats = {
            "rule": algorithm.dense_fallback,
            "is_dense": False,
            "tensors": 0,
            "payload_bytes": 0,
            "dense_bytes": 0,
        }
        if algorithm.dense_fallback == "measured":
            entry |= {"payload_seconds": None, "dense_seconds": None}
        return entry

    def _costs_more(self, names: Sequence[str], density: float, shares: bool = False) -> bool:
        """Return whether payloads cost more than dense. shares: whether other tensors are in the same messages."""
        if not self.is_on or density >= 1.0:
            return False
        return self._payload_bytes(names, density, shares) > self._dense_bytes(names)

    def _dense_bytes(self, names: Sequence[str]) -> int:
        return sum(2 * max(FLOAT32_BYTES, tensor.itemsize) * tensor.numel for tensor in map(self._tensors.get, names))

    def _payload_bytes(self, names: Sequence[str], density: float, shares: bool = False) -> int:
        """Return N / (N - 1) times the bytes that a rank receives for these tensors.

        In a reduce-scatter these include the owners' headers of one message, unless other tensors share it.
        """
        algorithm, tensors = self.algorithm, [self._tensors[name] for name in names]
        if algorithm.scatters(self.world_size, self._numels):
            selections = [tensors] if algorithm.selection == "model" else [[tensor] for tensor in tensors]
            size = sum(self._payload(selection, density) for selection in selections)
            kept = sum(top_k_count(sum(one.numel for one in selection), density) for selection in selections)
            completing = 2 * FLOAT32_BYTES * kept if algorithm.complete else 0  # an all-reduce
            headers = 0 if shares else self.world_size * HEADER_BYTES  # one for each owner
            return 2 * (size + headers) + completing  # entries to the owners, and kept sums
        if algorithm.selection in ("tensor", "threshold"):
            return self.world_size * sum(self._payload([tensor], density) for tensor in tensors)
        if algorithm.selection == "model":
            return self.world_size * self._payload(tensors, density)
        n = sum(tensor.numel for tensor in tensors)
        k = top_k_count(n, density)
        if algorithm.values == "float32":
            values = 2 * FLOAT32_BYTES * k  # an all-reduce
        else:
            values = self.world_size * payload_size(k, k, "dense", algorithm.values)
        return values + algorithm.index_bytes(n, k, self.world_size)

    def _payload(self, tensors: Sequence[TensorSize], density: float) -> int:
        """Return the bytes of one rank's payload of tensors with a joint selection."""
        algorithm, n = self.algorithm, sum(tensor.numel for tensor in tensors)
        segments = segments_of([tensor.shape for tensor in tensors], algorithm)
        return payload_size(n, top_k_count(n, density), algorithm.coding, algorithm.values, segments)
