"""scope="tensor": a selection in each variable, payloads in buckets."""

import functools

import tensorflow as tf

from hvd_sparse.buckets import plan_buckets
from hvd_sparse.centres import columns_of, segments_of
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.memory import read_after
from hvd_sparse.tensorflow.scope import Entry, Scope, Selection, Step
from hvd_sparse.tensorflow.threshold import make_thresholds
from hvd_sparse.wire import payload_size, top_k_count

LATE = 10**9  # a step by which a schedule has settled


class TensorScope(Scope):
    """A selection in each variable, payloads in buckets."""

    def _selections(self) -> list[str]:
        return list(self.memories)

    def _choose(self, entries: list[Entry], step: Step) -> dict[str, Selection]:
        names = [entry.name for entry in entries]
        counts = self._counts([entry.memory.size for entry in entries], step)
        chosen = {}
        for entry, k, hint in zip(entries, counts, self._hints.values(names, counts), strict=True):
            selection = {"k": k, "seed": step.seed, "threshold_hint": hint}
            entry.finite, *selected = entry.memory.accumulate_top_k(
                entry.gradient, entry.factor, step.is_active, **selection
            )
            chosen[entry.name] = self._selection(selected, [entry], k, step)
        return chosen

    def _send(self, entries: list[Entry], chosen: dict[str, Selection], step: Step) -> list[tf.Operation]:
        done = self._learn(chosen)
        members = {entry.name: entry for entry in entries}
        for bucket in plan_buckets(self._settled_sizes(list(chosen)), self.algorithm.bucket_bytes, "bucket"):
            payloads = [chosen[name].payload for name in bucket.offsets]
            gathered = self._gather(bucket.name, payloads, step)
            self._give_decoders(gathered, {name: members[name] for name in bucket.offsets}, chosen, step)
        for entry in entries:
            selection = chosen[entry.name]
            done += self._clear(entry.memory, selection.indices, selection.values, selection.left, step)
        return done

    def _learn(self, chosen: dict[str, Selection]) -> list[tf.Operation]:
        """Keep what the next step's selections start from."""
        selections = chosen.values()
        return self._hints.update(list(chosen), [one.k for one in selections], [one.info for one in selections])

    def _give_decoders(self, gathered, members: dict[str, Entry], chosen: dict[str, Selection], step: Step) -> None:
        """Give each member of a bucket its `decode`."""
        offset = tf.zeros([], tf.int64)
        for name, entry in members.items():
            entry.decode = functools.partial(self._reduce, gathered, offset, [entry], chosen[name].k, step)
            offset += tf.size(chosen[name].payload, tf.int64)

    def _settled_sizes(self, names: list[str]) -> dict[str, int]:
        """Return the payloads' sizes once the density has settled: a graph's buckets have the same members always."""
        density = self.algorithm.density_at(LATE)
        form, sizes = (self.algorithm.coding, self.algorithm.values), {}
        for name in names:
            n, shape = self.memories[name].size, self.memories[name].variable.shape.as_list()
            sizes[name] = payload_size(n, top_k_count(n, density), *form, segments_of([shape], self.algorithm))
        return sizes


class VaryingScope(TensorScope):
    """What reaches a threshold in each variable; the sizes of the payloads differ between ranks and steps."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._thresholds = make_thresholds(self.algorithm, list(self.memories))
        self.kept = self._thresholds.variables

    def _choose(self, entries: list[Entry], step: Step) -> dict[str, Selection]:
        residuals = {}
        for entry in entries:
            entry.finite = entry.memory.accumulate(entry.gradient, entry.factor, step.is_active)
            residuals[entry.name] = read_after(entry.memory.residual, entry.finite)
        counts = self._counts([entry.memory.size for entry in entries], step)
        thresholds, self._changes = self._thresholds.at(step.number, residuals, counts, step.is_active)
        chosen, found_counts = {}, []
        for entry, threshold in zip(entries, thresholds, strict=True):
            indices, values = ops.filter_threshold(residuals[entry.name], threshold)
            found = tf.size(indices, tf.int64)
            k = tf.maximum(found, 1)
            chosen[entry.name] = self._selection((indices, values, None), [entry], k, step, sent=found)
            found_counts.append(found)
        self._changes += self._thresholds.learn(list(residuals), counts, found_counts, step.is_active)
        return chosen

    def _learn(self, chosen: dict[str, Selection]) -> list[tf.Operation]:
        return self._changes

    def _give_decoders(self, gathered, members: dict[str, Entry], chosen: dict[str, Selection], step: Step) -> None:
        form = (self.algorithm.coding, self.algorithm.values)
        sizes = [entry.memory.size for entry in members.values()]
        columns = [columns_of(entry.memory.variable.shape, self.algorithm) for entry in members.values()]
        places = ops.locate_payloads(gathered, sizes, self.exchange.size(), *form, columns)
        for position, entry in enumerate(members.values()):
            place = (places[:, :, position], entry.memory.size, step.scale)
            entry.decode = functools.partial(ops.reduce_located, gathered, *place, *form, self._segments([entry]))
