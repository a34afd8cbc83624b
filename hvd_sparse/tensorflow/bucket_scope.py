"""Selections of exactly k, and their payloads in buckets: what scope="tensor" and scope="model" share.

A bucket is worked on as a whole, in one call into the core for all of its members: an operation in a graph costs more
than the selection in a small variable.
"""

import abc
from dataclasses import dataclass

import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.centres import columns_of
from hvd_sparse.tensorflow import ops
from hvd_sparse.tensorflow.memory import ResidualMemory
from hvd_sparse.tensorflow.scope import Entry, Scope, Step
from hvd_sparse.units import Units
from hvd_sparse.wire import LOW_BITS


@dataclass
class Message:
    """What this rank sends of a bucket."""

    name: str
    entries: list[Entry]
    counts: tf.Tensor  # k of each selection, int64[selections]
    form: dict  # how the operators of buckets lay it out
    most_bytes: int  # of its payloads, at any density of the schedule
    payloads: tf.Tensor | None = None  # uint8[bytes]
    info: tf.Tensor | None = None  # of `ops.accumulate_bucket`


class BucketScope(Scope):
    """Selections of exactly k; every payload has the same size on all ranks."""

    def _fill(self, name: str, entries: list[Entry], counts: tf.Tensor, hints: tf.Tensor, step: Step, joint: bool):
        """Accumulate and select in the members of a bucket, or in all of them together; pack what is to be sent."""
        memories = [entry.memory for entry in entries]
        message = Message(name, entries, counts, self._form(memories, joint), self._most_bytes(entries, joint))
        message.payloads, finite, message.info = ops.accumulate_bucket(
            [entry.gradient for entry in entries],
            *destinations(memories),
            factors=tf.stack([entry.factor for entry in entries]),
            weight_decay=decays(memories, step.units),
            is_active=step.is_active,
            ks=counts,
            seed=step.seed,
            threshold_hints=hints,
            centre=self.algorithm.centre,
            **message.form,
            **memories[0].rule(),
        )
        step.finite.append(finite)
        sent = tf.reduce_sum(counts)
        step.counted.add(payload_bytes=tf.size(message.payloads, tf.int64))
        step.counted.add(sent=sent if step.is_dense is None else tf.where(step.is_dense, tf.zeros_like(sent), sent))
        return message

    def _send(self, entries: list[Entry], messages: list[Message], step: Step) -> list[tf.Operation]:
        counts = tf.concat([message.counts for message in messages], 0)
        infos = tf.concat([message.info for message in messages], 0)
        done = self._hints.update(self._selected(entries), counts, infos)
        for message in messages:
            gathered = self._gather(message.name, message.payloads, message.most_bytes, step)
            sizes = [entry.memory.size for entry in message.entries]
            ranks, scale = step.units.world_size, step.units.outgoing()
            sums = ops.reduce_bucket(gathered, sizes, ranks, message.counts, scale, **message.form)
            cleared = self._cleared(message.payloads, message.counts, message.entries, step, message.form)
            done += self._delivered(message.entries, sums, step, cleared)
        return done

    def _delivered(self, entries: list[Entry], sums: list[tf.Tensor], step: Step, cleared: tf.Operation) -> list:
        """Give the entries their sums; return what the step has to have done."""
        done = [cleared]
        for entry, total in zip(entries, sums, strict=True):
            done += self._held(entry, total, step, [cleared])
        return done

    def _most_bytes(self, entries: list[Entry], joint: bool) -> int:
        selections = [entries] if joint else [[entry] for entry in entries]
        return sum(self._largest_payload(selection, self.algorithm.schedule.highest) for selection in selections)

    def _cleared(
        self, payloads: tf.Tensor, ks: tf.Tensor, entries: list[Entry], step: Step, form: dict
    ) -> tf.Operation:
        """Take what was sent out of the memories, unless the step does not count."""
        cleared = [entry.memory.cleared() for entry in entries]
        buffers = ([own[0] for own in cleared], [velocity for own in cleared for velocity in own[1:]])
        return ops.clear_bucket(payloads, ks, step.void, *buffers, **form, kept=entries[0].memory.kept)

    @abc.abstractmethod
    def _selected(self, entries: list[Entry]) -> list[str]:
        """Return the names of the selections in these, in the order of their messages."""

    def _form(self, memories: list, joint: bool) -> dict:
        algorithm = self.algorithm
        columns = columns_of_all(memories, algorithm)
        return {"coding": algorithm.coding, "value_dtype": algorithm.values, "columns": columns, "joint": joint}


def columns_of_all(memories: list[ResidualMemory], algorithm: Algorithm) -> list[int]:
    """Return how many groups of low-bit values each variable has, nothing where values have no centres."""
    if algorithm.values not in LOW_BITS:
        return []
    return [columns_of(memory.variable.shape, algorithm) for memory in memories]


def destinations(memories: list[ResidualMemory]) -> list[list]:
    """Return residuals, velocities and parameters, each as many as there are members, or none."""
    columns = list(zip(*(memory.destination() for memory in memories), strict=True))
    unread = tf.zeros([0])  # in place of a parameter that does not decay
    lists = [[unread if one is None else one for one in column] for column in columns]
    return [[] if all(one is unread for one in column) else column for column in lists]


def decays(memories: list[ResidualMemory], units: Units) -> list[float]:
    """Return the weight decays, as `ops.accumulate_bucket` takes them."""
    return [units.decay(memory.weight_decay) for memory in memories]
