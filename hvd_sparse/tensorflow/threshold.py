"""The thresholds of all selections of a step, as vectors in tf.Variables.

The update rules are those of `hvd_sparse.threshold`, as operations on vectors: these cost less than calls of Python
(`tf.numpy_function`), which only what changes rarely makes here.
"""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

import hvd_sparse.partition
from hvd_sparse.algorithms import Algorithm, DynamicCommunicationThresholding, SIDCo
from hvd_sparse.partition import threshold_scale
from hvd_sparse.tensorflow.error_feedback import make_variable
from hvd_sparse.threshold import (
    ADAPT_STEPS,
    HIGHEST_MARGIN,
    LOWEST_MARGIN,
    SMALLEST,
    FittedThreshold,
    ThresholdHint,
    Turns,
    lowered,
    most_passed,
    raised,
)

NEVER = np.finfo(np.float64).max  # no float32 reaches it; tf.debugging.enable_check_numerics() refuses infinity
FilterArguments = dict[str, tf.Tensor]  # those of `varying_ops.filter_bucket`: thresholds, ks, and stages if any


class ThresholdHints:
    """The last step's thresholds, slightly lowered, as guesses for this step; a checkpoint does not need them."""

    def __init__(self, names: list[str]):
        self._row = {name: row for row, name in enumerate(names)}
        first = ThresholdHint()
        self._threshold, self._margin, self._k = (
            make_variable([len(names)], f"hvd_sparse/hint/{kind}", tf.float64, value)
            for kind, value in (("threshold", first.threshold), ("margin", first.margin), ("k", float(first.k)))
        )

    def values(self, names: list[str], counts: tf.Tensor) -> tf.Tensor:
        """Return a float64 hint for each named selection, 0 if there is none. counts: k of each selection, int64."""
        threshold, margin, known = self._read(names)
        return _hints(threshold, margin, known, tf.cast(counts, tf.float64))

    def update(self, names: list[str], counts: tf.Tensor, infos: tf.Tensor) -> list[tf.Operation]:
        """Update the hints. infos, float64[m, 2]: the threshold, and the number of elements that reached the hint."""
        threshold, margin, known = self._read(names)
        k = tf.cast(counts, tf.float64)
        found, passed = tf.unstack(infos, axis=1)
        used = _hints(threshold, margin, known, k) > 0.0
        lower, higher = tf.maximum(lowered(margin), LOWEST_MARGIN), tf.minimum(raised(margin), HIGHEST_MARGIN)
        learnt = tf.where(passed < k, lower, tf.where(passed > most_passed(k), higher, margin))
        rows = self._rows(names)
        changes = ((self._threshold, found), (self._margin, tf.where(used, learnt, margin)), (self._k, k))
        return [variable.scatter_update(tf.IndexedSlices(new, rows)) for variable, new in changes]

    def _read(self, names: list[str]) -> list[tf.Tensor]:
        rows = self._rows(names)
        return [tf.gather(variable.read_value(), rows) for variable in (self._threshold, self._margin, self._k)]

    def _rows(self, names: list[str]) -> tf.Tensor:
        return tf.constant([self._row[name] for name in names], tf.int64)


def _hints(threshold, margin, known, k) -> tf.Tensor:
    return tf.where(tf.equal(known, k), threshold * margin, tf.zeros_like(threshold))


class ConstantThresholds:
    """A fixed threshold, the same for all variables."""

    rows: Mapping[str, int] = {}  # of each selection in `variables`, which a checkpoint contains

    def __init__(self, value: float):
        self._value = value
        self.variables: list[tf.Variable] = []

    def plan(self, step, names: list[str], counts, is_active) -> FilterArguments:
        """Return a float64 threshold for each variable, NEVER unless active; and ks of 0, as none is refreshed."""
        thresholds = tf.where(is_active, tf.constant(self._value, tf.float64), tf.constant(NEVER, tf.float64))
        return {"thresholds": tf.fill([len(names)], thresholds), "ks": tf.zeros_like(counts)}

    def learn(self, names: list[str], counts, infos: tf.Tensor, is_active) -> list[tf.Operation]:
        """Do nothing: a fixed threshold does not adapt."""
        return []

    def miss(self, step) -> list[tf.Operation]:
        """Do nothing: a fixed threshold has no turn to miss."""
        return []


class KeptThresholds:
    """The thresholds of DCT: `hvd_sparse.threshold.KeptThreshold` for all variables, in tf.Variables."""

    def __init__(self, algorithm: DynamicCommunicationThresholding, names: list[str]):
        self._turns = Turns(algorithm, len(names))
        self._band = algorithm.band
        self.rows = {name: row for row, name in enumerate(sorted(names))}
        self._value, self._k = self.variables = [
            make_variable([len(names)], f"hvd_sparse/threshold/{kind}", tf.float64) for kind in ("value", "k")
        ]

    def plan(self, step, names: list[str], counts, is_active) -> FilterArguments:
        """Return a float64 threshold for each variable, NEVER unless active; and k to refresh it, else 0."""
        rows = [self.rows[name] for name in names]
        self._turn, all_drains = self._turns_of(step)
        refreshes, drains = tf.gather(self._turn, rows), tf.gather(all_drains, rows)
        kept, known = (tf.gather(variable.read_value(), rows) for variable in self.variables)
        due = refreshes | tf.equal(kept, 0.0) | tf.not_equal(known, tf.cast(counts, tf.float64))
        self._due = due & tf.logical_not(drains) & is_active
        self._misses_kept = refreshes & (drains | tf.logical_not(is_active))
        self._uses_kept = tf.logical_not(due | drains) & is_active
        thresholds = tf.where(drains, tf.fill([len(rows)], tf.constant(SMALLEST, tf.float64)), kept)
        thresholds = tf.where(is_active, thresholds, tf.fill([len(rows)], tf.constant(NEVER, tf.float64)))
        return {"thresholds": thresholds, "ks": tf.where(self._due, counts, tf.zeros_like(counts))}

    def learn(self, names: list[str], counts, infos: tf.Tensor, is_active) -> list[tf.Operation]:
        """Store the refreshed thresholds, after `plan` in the same trace; infos: from `varying_ops.filter_bucket`.

        A threshold is refreshed in the next step that uses it if its count has left the band, or if this step has not
        used it at its turn: its variable was drained, sent dense, or had no gradient.
        """
        rows, k = [self.rows[name] for name in names], tf.cast(counts, tf.float64)
        value, known = (tf.gather(kept.read_value(), rows) for kept in self.variables)
        expires = self._misses_kept
        if self._band is not None:
            too_few = (infos[:, 1] * self._band < k) & (value > SMALLEST)  # SMALLEST cannot be lowered
            leaves = too_few | (infos[:, 1] > k * self._band)
            expires |= self._uses_kept & leaves
        value = tf.where(expires, tf.zeros_like(value), value)
        taken = tf.maximum(infos[:, 0], SMALLEST)  # 0 means none; zeros are never sent
        changes = (tf.where(self._due, taken, value), tf.where(self._due, k, known))
        is_absent = np.isin(np.arange(len(self.rows)), rows, invert=True)
        return [
            *(v.scatter_update(tf.IndexedSlices(new, rows)) for v, new in zip(self.variables, changes, strict=True)),
            self._expire(self._turn & is_absent),
        ]

    def miss(self, step) -> list[tf.Operation]:
        """Note that a step has used no threshold: see `hvd_sparse.threshold.KeptThreshold.miss`."""
        return [self._expire(self._turns_of(step)[0])]

    def _expire(self, expires: tf.Tensor) -> tf.Operation:
        """Have the next step that uses a threshold renew it, for the rows of bool[rows]."""
        rows = tf.where(expires)[:, 0]
        return self._value.scatter_update(tf.IndexedSlices(tf.zeros_like(rows, tf.float64), rows))

    def _turns_of(self, step) -> list[tf.Tensor]:
        """Return whose turn a step is, and who is drained in it, bool[rows]."""

        def turns(step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Return both for a step that is known."""
            rows = range(len(self.rows))
            refreshes = np.array([self._turns.refreshes(int(step), row) for row in rows])
            return refreshes, np.array([self._turns.drains(int(step), row) for row in rows])

        found = tf.numpy_function(turns, [step], (tf.bool, tf.bool), stateful=False)
        return [tf.ensure_shape(rows, [len(self.rows)]) for rows in found]


class FittedThresholds:
    """The thresholds of SIDCo: `hvd_sparse.threshold.FittedThreshold` for all variables, in tf.Variables."""

    def __init__(self, algorithm: SIDCo, sizes: Mapping[str, int]):
        self._algorithm, self._sizes = algorithm, sizes
        names = sorted(sizes)
        self.rows = {name: row for row, name in enumerate(names)}
        # The numbers of `FittedThreshold`, which all start at zero.
        self._more, *_ = self.variables = [
            make_variable([len(names)], f"hvd_sparse/threshold/{kind}", tf.float64)
            for kind in ("more_stages", "turned", "error", "adapted", "achieved", "steps")
        ]
        self._guesses = make_variable([len(names)], "hvd_sparse/hint/fitted", tf.float64)  # not in checkpoints

    def plan(self, step, names: list[str], counts, is_active) -> FilterArguments:
        """Return a float64 guess for each variable, NEVER unless active; k; and the number of stages of the fit."""
        rows = [self.rows[name] for name in names]
        more, guesses = (tf.gather(one.read_value(), rows) for one in (self._more, self._guesses))
        stages = tf.cast(more, tf.int64) + self._algorithm.stages
        none, never = tf.zeros_like(counts), tf.fill([len(names)], tf.constant(NEVER, tf.float64))
        return {
            "thresholds": tf.where(is_active, guesses, never),
            "ks": tf.where(is_active, counts, none),
            "stages": tf.where(is_active, stages, none),
        }

    def learn(self, names: list[str], counts, infos: tf.Tensor, is_active) -> list[tf.Operation]:
        """Adapt the stages to how many elements were selected instead of k, after `plan` in the same trace."""
        rows = [self.rows[name] for name in names]
        k = tf.cast(counts, tf.float64)
        density = k / tf.constant([self._sizes[name] for name in names], tf.float64)
        old = tf.stack([tf.gather(variable.read_value(), rows) for variable in self.variables])
        planned = tf.numpy_function(self._adapt, [old, infos[:, 1] / k, density], tf.float64, stateful=False)
        new = tf.unstack(tf.ensure_shape(tf.where(is_active, planned, old), [len(self.variables), len(rows)]))
        new.append(tf.where(is_active, infos[:, 0], tf.zeros_like(k)))
        changes = zip([*self.variables, self._guesses], new, strict=True)
        return [variable.scatter_update(tf.IndexedSlices(value, rows)) for variable, value in changes]

    def miss(self, step) -> list[tf.Operation]:
        """Do nothing: each selection has a new threshold."""
        return []

    def _adapt(self, old: np.ndarray, ratio: np.ndarray, density: np.ndarray) -> np.ndarray:
        """Return the variables' next values, float64[variables, rows]."""
        numbers, threshold = old.copy(), FittedThreshold(self._algorithm)
        achieved, steps = numbers[-2:]
        achieved += ratio
        steps += 1.0
        for row in np.flatnonzero(steps == ADAPT_STEPS):
            threshold.restore(numbers[:, row])
            threshold.adapt(density[row])
            numbers[:, row] = threshold.numbers()
        return numbers


class ScaledThreshold:
    """The scaled threshold of MiCRO: `hvd_sparse.partition.ScaledThreshold`, in tf.Variables."""

    rows: Mapping[str, int] = {"model": 0}

    def __init__(self):
        self._value, self._k = self.variables = [
            make_variable([1], f"hvd_sparse/threshold/scaled_{kind}", tf.float64) for kind in ("value", "k")
        ]

    def plan(self, k: tf.Tensor, world_size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the float64 threshold of a step, reset if k has changed; and -1, for no share."""
        value, known = self._value.read_value()[0], self._k.read_value()[0]
        k = tf.cast(k, tf.float64)
        return tf.where(tf.equal(known, k), value, 0.5 / tf.sqrt(k)), tf.constant(-1.0, tf.float64)

    def learn(self, k: tf.Tensor, count: tf.Tensor, value: tf.Tensor, now) -> list[tf.Operation]:
        """Scale a step's threshold by the number of elements that all ranks sent, unless the step is skipped."""
        wanted = tf.cast(k, tf.float64)
        excess = tf.cast(count, tf.float64) / wanted
        scale = tf.numpy_function(lambda x: np.float64(threshold_scale(x)), [excess], tf.float64, stateful=False)
        changes = ((self._value, tf.maximum(value * tf.ensure_shape(scale, []), SMALLEST)), (self._k, wanted))
        return [old.assign(tf.where(now.ignores_payloads, old.read_value(), new[None])) for old, new in changes]


class PredictedThreshold:
    """The predicted threshold of MiCRO: `hvd_sparse.partition.PredictedThreshold`, in tf.Variables."""

    rows: Mapping[str, int] = {"model": 0}

    def __init__(self):
        self.variables = [
            make_variable([1], f"hvd_sparse/threshold/predicted_{kind}", tf.float64)
            for kind in ("value", "k", "growth", "elasticity", "share", "ranks")
        ]

    def plan(self, k: tf.Tensor, world_size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return a step's threshold and this rank's share of k, float64."""

        def plan(numbers: np.ndarray, k: np.ndarray) -> np.ndarray:
            """Return threshold and share."""
            threshold, share = _restored(numbers).plan(int(k), world_size)
            return np.array([min(threshold, NEVER), share])

        planned = tf.numpy_function(plan, [self._numbers(), k], tf.float64, stateful=False)
        return tuple(tf.unstack(tf.ensure_shape(planned, [2])))

    def learn(self, k: tf.Tensor, sketches: tf.Tensor, rank: int, now) -> list[tf.Operation]:
        """Update the threshold from the ranks' sketches, float32[ranks * 65], unless the step is skipped."""

        def learn(numbers: np.ndarray, k: np.ndarray, sketches: np.ndarray) -> np.ndarray:
            """Return the state of the next step."""
            threshold = _restored(numbers)
            threshold.learn(int(k), rank, sketches.reshape(now.units.world_size, -1))
            return np.array(threshold.numbers())

        old = self._numbers()
        learnt = tf.numpy_function(learn, [old, k, sketches], tf.float64, stateful=False)
        new = tf.unstack(tf.where(now.ignores_payloads, old, tf.ensure_shape(learnt, [len(self.variables)])))
        return [variable.assign(value[None]) for variable, value in zip(self.variables, new, strict=True)]

    def _numbers(self) -> tf.Tensor:
        return tf.concat([variable.read_value() for variable in self.variables], 0)


def _restored(numbers: np.ndarray) -> hvd_sparse.partition.PredictedThreshold:
    threshold = hvd_sparse.partition.PredictedThreshold()
    threshold.restore(numbers.tolist())
    return threshold


def make_thresholds(
    algorithm: Algorithm, sizes: Mapping[str, int]
) -> ConstantThresholds | KeptThresholds | FittedThresholds:
    """Return the thresholds of a method that selects by threshold. sizes: elements of each variable, by name."""
    if isinstance(algorithm, SIDCo):
        return FittedThresholds(algorithm, sizes)
    if isinstance(algorithm, DynamicCommunicationThresholding):
        return KeptThresholds(algorithm, list(sizes))
    return ConstantThresholds(algorithm.value)
