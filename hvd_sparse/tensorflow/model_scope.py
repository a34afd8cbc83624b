"""scope="model": one selection in all variables together."""

import itertools

import tensorflow as tf

from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.memory import read_after
from hvd_sparse.tensorflow.scope import Entry, Scope, Selection, Step


class ModelScope(Scope):
    """One selection in all variables: a global threshold, and clipping by the norm of the whole local gradient.

    Laid out in the order of the compressor's variables. The small ones travel dense, through Horovod's own allreduce.
    """

    def _selections(self) -> list[str]:
        return ["model"]

    def _choose(self, entries: list[Entry], step: Step) -> Selection:
        n = sum(entry.memory.size for entry in entries)
        (k,) = self._counts([n], step)
        (hint,) = self._hints.values(["model"], [k])
        return self._selection(ops.select_top_k(self._accumulate(entries, step), k, step.seed, hint), entries, k, step)

    def _accumulate(self, entries: list[Entry], step: Step) -> tf.Tensor:
        """Bring all gradients into their memories; return the whole residual."""
        residuals = []
        for entry in entries:
            memory = entry.memory
            entry.finite = memory.accumulate(entry.gradient, entry.factor, step.is_active)
            residuals.append(read_after(memory.residual, entry.finite))
        return tf.concat(residuals, 0)

    def _send(self, entries: list[Entry], selection: Selection, step: Step) -> list[tf.Operation]:
        k = selection.k
        done = self._hints.update(["model"], [k], [selection.info])
        gathered = self._gather("model", [selection.payload], step)
        self._give_parts(entries, self._reduce(gathered, 0, entries, k, step))
        return done + self._clear_parts(entries, selection, step)

    @staticmethod
    def _give_parts(entries: list[Entry], whole: tf.Tensor) -> None:
        """Give each entry its part of the sum."""
        for entry, part in zip(entries, tf.split(whole, [entry.memory.size for entry in entries]), strict=True):
            entry.decode = lambda part=part: part

    def _clear_parts(self, entries: list[Entry], selection: Selection, step: Step) -> list[tf.Operation]:
        """Cut the selection into that of each variable."""
        offsets = [0, *itertools.accumulate(entry.memory.size for entry in entries)]
        bounds = tf.searchsorted(selection.indices, tf.constant(offsets, tf.int64), out_type=tf.int64)
        parts = [
            tf.split(tensor, bounds[1:] - bounds[:-1], num=len(entries))
            for tensor in (selection.indices, selection.values, selection.left)
        ]
        done = []
        for entry, offset, indices, values, left in zip(entries, offsets, *parts, strict=False):
            done += self._clear(entry.memory, indices - offset, values, left, step)
        return done
