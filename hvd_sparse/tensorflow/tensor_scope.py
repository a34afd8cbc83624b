"""scope="tensor": a selection in each variable, payloads in buckets."""

import tensorflow as tf

from hvd_sparse.buckets import plan_buckets
from hvd_sparse.tensorflow.scope import Entry, Scope, Selection, Step
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
            chosen[entry.name] = self._selection(*selected, entry.memory.size, k, step)
        return chosen

    def _send(self, entries: list[Entry], chosen: dict[str, Selection], step: Step) -> list[tf.Operation]:
        names = [entry.name for entry in entries]
        done = self._hints.update(names, [chosen[name].k for name in names], [chosen[name].info for name in names])
        members = {entry.name: entry for entry in entries}
        for bucket in plan_buckets(self._settled_sizes(names), self.algorithm.bucket_bytes, "bucket"):
            payloads = [chosen[name].payload for name in bucket.offsets]
            gathered = self._gather(bucket.name, payloads, step)
            offset = tf.zeros([], tf.int64)
            for name, payload in zip(bucket.offsets, payloads, strict=True):
                members[name].decode = self._decoder(gathered, offset, members[name], chosen[name].k, step)
                offset += tf.size(payload, tf.int64)
        for entry in entries:
            selection = chosen[entry.name]
            done += self._clear(entry.memory, selection.indices, selection.values, selection.left, step)
        return done

    def _decoder(self, gathered, offset, entry: Entry, k, step: Step):
        return lambda: self._reduce(gathered, offset, entry.memory.size, k, step)

    def _settled_sizes(self, names: list[str]) -> dict[str, int]:
        """Return the payloads' sizes once the density has settled: a graph's buckets have the same members always."""
        density = self.algorithm.density_at(LATE)
        sizes = {name: self.memories[name].size for name in names}
        return {
            name: payload_size(n, top_k_count(n, density), self.algorithm.coding, self.algorithm.values)
            for name, n in sizes.items()
        }
