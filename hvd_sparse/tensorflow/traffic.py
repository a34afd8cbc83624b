"""Counts of bytes and elements sent, in variables of a graph."""

from collections import defaultdict

import tensorflow as tf

from hvd_sparse.tensorflow.error_feedback import make_variable
from hvd_sparse.traffic import Stats, report

COUNTERS = ("dense_bytes", "payload_bytes", "surplus_bytes", "elements", "sent")


class Counted:
    """The counters of one step while its graph is laid out: Python numbers, and tensors where they vary."""

    def __init__(self):
        self._fixed = defaultdict(int)
        self._varying = defaultdict(list)

    def add(self, **counts) -> None:
        """Add numbers, or integer scalar tensors, to counters by name."""
        for name, count in counts.items():
            known = tf.get_static_value(count) if tf.is_tensor(count) else count
            if known is None:
                self._varying[name].append(tf.cast(count, tf.int64))
            else:
                self._fixed[name] += int(known)

    def vector(self) -> tf.Tensor:
        """Return the counters, int64[5]."""
        return tf.stack([tf.add_n([tf.constant(self._fixed[n], tf.int64), *self._varying[n]]) for n in COUNTERS])


class TrafficVariables:
    """Counters of one compressor on this rank: see `hvd_sparse.torch.traffic.Traffic`. A graph knows no seconds."""

    def __init__(self):
        self.variables = [
            make_variable(shape, f"hvd_sparse/traffic/{name}", tf.int64)
            for name, shape in (("steps", []), ("skipped", []), ("step", [len(COUNTERS)]), ("total", [len(COUNTERS)]))
        ]

    def end_step(self, counted: Counted, overflow: tf.Tensor) -> list[tf.Operation]:
        """Close a step. overflow: whether it is skipped."""
        steps, skipped, step, total = self.variables
        vector = counted.vector()
        skips = skipped.assign_add(tf.cast(overflow, tf.int64))
        return [steps.assign_add(1), skips, step.assign(vector), total.assign_add(vector)]

    @staticmethod
    def summary(steps, step, total) -> Stats:
        """Return {"steps": int, "step": last step, "total": all} from the variables' values."""
        last, every = (report(dict(zip(COUNTERS, map(int, vector), strict=True)), ()) for vector in (step, total))
        return {"steps": int(steps), "step": last, "total": every}
