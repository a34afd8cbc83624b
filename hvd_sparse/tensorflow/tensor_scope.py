"""scope="tensor": a selection in each variable, payloads in buckets."""

from hvd_sparse.centres import segments_of
from hvd_sparse.plan import plan_buckets
from hvd_sparse.tensorflow.bucket_scope import BucketScope, Message
from hvd_sparse.tensorflow.scope import Entry, Step
from hvd_sparse.wire import payload_size, top_k_count

LATE = 10**9  # a step by which a schedule has settled


class TensorScope(BucketScope):
    """A selection in each variable."""

    def _selections(self) -> list[str]:
        return sorted(self.memories)

    def _selected(self, entries: list[Entry]) -> list[str]:
        return sorted(entry.name for entry in entries)

    def _choose(self, entries: list[Entry], step: Step) -> list[Message]:
        entries = sorted(entries, key=lambda entry: entry.name)  # as buckets are cut
        names = self._selected(entries)
        counts = self._counts([entry.memory.size for entry in entries], step)
        hints = self._hints.values(names, counts)
        messages, begin = [], 0
        for bucket in plan_buckets(self._settled_sizes(names), self.algorithm.bucket_bytes, "bucket"):
            members = slice(begin, begin + len(bucket.offsets))
            messages.append(
                self._fill(bucket.name, entries[members], counts[members], hints[members], step, joint=False)
            )
            begin = members.stop
        return messages

    def _settled_sizes(self, names: list[str]) -> dict[str, int]:
        """Return the payloads' sizes once the density has settled: a graph's buckets have the same members always."""
        density = self.algorithm.schedule.density(LATE)
        form, sizes = (self.algorithm.coding, self.algorithm.values), {}
        for name in names:
            n, shape = self.memories[name].size, self.memories[name].variable.shape.as_list()
            sizes[name] = payload_size(n, top_k_count(n, density), *form, segments_of([shape], self.algorithm))
        return sizes
