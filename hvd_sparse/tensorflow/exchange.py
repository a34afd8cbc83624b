"""Horovod's named collectives, as operations in a graph.

The twin of `hvd_sparse.torch.exchange`. There, a collective is a handle on which Python waits; here, it is an
operation, and the graph's dependencies order it. The names derive from the compressor's ordinal and from fixed bucket
numbers.
"""

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_sparse.algorithms import Algorithm
from hvd_sparse.announcement import BETWEEN_STEPS, check_all_between_steps, reason_message, texts_of
from hvd_sparse.checkpoint import refusal
from hvd_sparse.configuration_check import CHECK_FAILED, digest, explain_difference
from hvd_sparse.frames import warn
from hvd_sparse.members import Members, is_elastic
from hvd_sparse.messages import not_called
from hvd_sparse.pieces import WORD_BYTES, Pieces, plan_pieces
from hvd_sparse.timeouts import TIMEOUT_SECONDS

# Of the presence sum: presence, step, loss scale, misplaced and six of the digest, each with its square.
PRESENCE_NUMBERS = 2 * (1 + 1 + 1 + 1 + 6)


class Exchange(Members):
    """The collectives of one compressor over one process set.

    In a graph, their names begin with HorovodAllreduce or HorovodAllgather: hvd.elastic.run recognises by these words a
    collective that failed because a rank died, and treats any other failure as the end of training. It does not know
    HorovodAlltoall, so an all-to-all is named as an all-gather.
    """

    def __init__(self, process_set=None):
        super().__init__(hvd, process_set, "hvd_sparse.tf")
        self._functions: dict[tuple, Callable] = {}  # of `run_now`

    def describe(self) -> str:
        """Return a line that identifies the compressor, for the configuration check across ranks."""
        return f"compressor = {self._prefix}"

    def op_name(self, name: str) -> str:
        """Return a name for a tensor that Horovod all-reduces: Horovod calls its collective after the tensor."""
        return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{self._prefix}.{name}")

    def is_used(self) -> bool:
        """Return whether Horovod will call the compressor: not on a single rank, nor outside the process set."""
        if not hvd.is_initialized():
            return is_elastic()
        return self.process_set.included() and (is_elastic() or self.size() > 1)

    def warn_if_single(self, algorithm: Algorithm) -> None:
        """Warn if Horovod calls no compressor, as this rank is alone, and the method takes the optimizer's work."""
        if algorithm.replaces_optimizer and hvd.is_initialized() and self.process_set.included() and self.size() == 1:
            where = "with one process" if hvd.size() == 1 else "in a process set of one rank"
            warn(not_called(algorithm.name, where))

    def is_last_of_elastic(self) -> bool:
        """Return whether this is the only rank of an elastic job, at present."""
        return is_elastic() and self.size() == 1

    def allgather(self, name: str, payload: tf.Tensor, most_bytes: int) -> tf.Tensor:
        """All-gather uint8[bytes], a multiple of 8 that may differ between ranks; the result is in rank order.

        most_bytes: the upper bound of a rank's payload, the same on all ranks. It determines the number of collectives
        (`hvd_sparse.pieces`).
        """
        words = tf.bitcast(tf.reshape(payload, [-1, WORD_BYTES]), tf.int64)
        ranks = self.size()
        cut = plan_pieces(most_bytes, ranks)
        if cut.pieces == 1:
            gathered = self.gather(name, words)
        else:
            parts = enumerate(cut_pieces(words, cut))
            gathered = join_pieces([self.gather(f"{name}.piece{piece}", part) for piece, part in parts], ranks, cut)
        return tf.reshape(tf.bitcast(gathered, tf.uint8), [-1])

    def alltoall(self, name: str, payload: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        """Send each rank its part of uint8[bytes]; return the parts that all ranks sent to this one, in rank order.

        splits: int32[ranks], the number of 8-byte words for each rank.
        """
        words = tf.bitcast(tf.reshape(payload, [-1, WORD_BYTES]), tf.int64)
        return tf.reshape(tf.bitcast(self._alltoall(name, words, splits), tf.uint8), [-1])

    def alltoall_floats(self, name: str, tensor: tf.Tensor, sizes: list[int]) -> tf.Tensor:
        """Send each rank its part of a float32 vector, split by `sizes`; return the parts sent to this rank."""
        return self._alltoall(name, tensor, tf.constant(sizes, tf.int32))

    def _alltoall(self, name: str, tensor: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        name = f"HorovodAllgather.{self._prefix}.{name}.alltoall"  # see the class
        return hvd.alltoall(tensor, splits, name=name, ignore_name_scope=True, process_set=self.process_set)[0]

    def gather(self, name: str, tensor: tf.Tensor) -> tf.Tensor:
        """All-gather tensors of any type, concatenated in rank order along the first dimension."""
        name = f"HorovodAllgather.{self._prefix}.{name}"
        return hvd.allgather(tensor, name=name, ignore_name_scope=True, process_set=self.process_set)

    def allreduce(self, name: str, tensor: tf.Tensor) -> tf.Tensor:
        """All-reduce (sum) a tensor."""
        name = f"HorovodAllreduce.{self._prefix}.{name}"
        return hvd.allreduce(tensor, op=hvd.Sum, name=name, ignore_name_scope=True, process_set=self.process_set)

    def furthest(self, name: str, numbers: tf.Tensor) -> tf.Tensor:
        """Return the largest of all ranks' numbers, int64, for an elastic job, where new ranks begin with step 0.

        numbers: a scalar, or a vector that is compared element by element.

        Raises InvalidArgumentError, without waiting for other ranks, if this graph was built for another rank or size.
        """
        own = self.unless_stale(numbers)
        name = f"HorovodAllreduce.{self._prefix}.{name}"
        return hvd.allreduce(own, op=hvd.Max, name=name, ignore_name_scope=True, process_set=self.process_set)

    def unless_stale(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor; raise InvalidArgumentError if this graph was built for another rank or size."""
        then, now = [hvd.rank(), self.size()], [hvd.rank_op(), hvd.size_op(self.process_set.process_set_id)]
        stale = (
            "hvd_sparse: this training step was traced for other ranks than Horovod has now. Make the tf.function, and "
            "Horovod's tape or optimizer around the same compressor, inside the function that hvd.elastic.run is "
            "given. Rank and number of ranks, then and now:"
        )
        check = tf.debugging.Assert(tf.reduce_all(tf.equal(tf.stack(now), then)), [stale, then, *now])
        with tf.control_dependencies([check]):
            return tf.identity(tensor)

    def check_configuration(self, lines: list[str]) -> None:
        """Raise ValueError on every rank, naming the difference, unless all ranks pass the same lines.

        Runs eagerly, outside any graph. TensorFlow 1 graphs, where this is impossible, compare a digest in every step
        instead (`Step`).
        """
        in_time(lambda: self._compare(lines))

    def refuse_together(self, reason: str, session) -> None:
        """Raise ValueError on every rank if any of them has a reason not to load its state.

        In an elastic job, each rank raises for itself only: other ranks may be new, or not have started yet.
        """
        reasons = self.meet("load", reason, session)
        message = reason if reasons is None else refusal(reasons)
        if message:
            raise ValueError(message)

    def meet(self, why: str, text: str, session) -> list[str] | None:
        """Return the texts of all ranks, which meet between two steps; RuntimeError if a rank does something else.

        In an elastic job, where other ranks may be new, or not have started yet, they do not meet: None.
        """
        if not self.is_used() or is_elastic() or not (tf.executing_eagerly() or session is not None):
            return None
        announced = Announcement(self) if session is None else None
        return in_time(lambda: self._meet(why, text, session), announced)

    def _meet(self, why: str, text: str, session=None) -> list[str]:
        own = np.frombuffer(reason_message(why, text), np.uint8)
        return texts_of([bytes(row) for row in self._gather_now(own[None], session)], why)

    def _gather_now(self, array: np.ndarray, session) -> np.ndarray:
        if session is None:
            return self.run_now(self.gather, "between", tf.constant(array))
        with session.graph.as_default():
            gathered = self.gather("between", tf.constant(array))
        return session.run(gathered)

    def run_now(self, collective: Callable, name: str, own: tf.Tensor) -> np.ndarray:
        """Return the result of a collective outside a step, in a graph: eager operations have no individual names."""
        key = name, own.shape, own.dtype, hvd.rank(), self.size()  # the last two change in elastic jobs
        if key not in self._functions:  # traced once: TensorFlow warns of a function that is made for each call
            graph = tf.function(lambda own: collective(name, own), autograph=False)
            self._functions[key] = graph.get_concrete_function(tf.TensorSpec(own.shape, own.dtype))
        return self._functions[key](own).numpy()

    def _compare(self, lines: list[str]) -> None:
        if not tf.executing_eagerly():
            return
        digests = self._meet("start", digest(lines).hex())
        if all(one == digests[0] for one in digests):
            return
        texts = self._gather_bytes("configuration.text", "\n".join(lines).encode())
        raise ValueError(explain_difference([text.decode().split("\n") for text in texts]))

    def _gather_bytes(self, name: str, content: bytes) -> list[bytes]:
        def gather(part: str, array: np.ndarray) -> np.ndarray:
            """Gather one array from each rank."""
            full = f"{self._prefix}.{name}.{part}"
            return hvd.allgather(tf.constant(array), name=full, process_set=self.process_set).numpy()

        sizes = gather("size", np.array([len(content)], np.int64))
        whole = gather("bytes", np.frombuffer(content, np.uint8)).tobytes()
        ends = np.cumsum(sizes)
        return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class Announcement:
    """Announces that this rank waits for the others between two steps: see `hvd_sparse.announcement`."""

    def __init__(self, exchange: Exchange):
        own = tf.constant([BETWEEN_STEPS] + [0.0] * (PRESENCE_NUMBERS - 1), tf.float64)
        self._exchange, self._sums = exchange, None
        self._thread = threading.Thread(target=self._announce, args=(own,), daemon=True)
        self._thread.start()

    def _announce(self, own: tf.Tensor) -> None:
        with contextlib.suppress(tf.errors.OpError):  # Horovod shuts down, and the result is no longer needed
            self._sums = self._exchange.run_now(self._exchange.allreduce, "present", own)  # as in a step

    def check(self) -> None:
        """Raise RuntimeError if the announcement has met ranks that are in a step."""
        if self._sums is not None:
            check_all_between_steps(float(self._sums[0]), self._exchange.size())

    def end(self) -> None:
        """Wait until all ranks have announced, so that the collective's name is free."""
        self._thread.join()


def in_time(function: Callable, announced: Announcement | None = None):
    """Return the result of a function that waits for all ranks; RuntimeError if it takes over TIMEOUT_SECONDS.

    announced: detects that other ranks are in a step instead.

    The function runs in a separate thread, which is outside the graph being traced here and can be abandoned.
    """
    results, failures = [], []

    def run() -> None:
        """Store the result or the exception for the caller's thread."""
        try:
            results.append(function())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.05 if announced else TIMEOUT_SECONDS)
        if announced and thread.is_alive():
            announced.check()
    if thread.is_alive():
        raise RuntimeError(CHECK_FAILED)
    if failures:
        raise failures[0]
    if announced:
        announced.end()
    return results[0]


def digest_numbers(lines: list[str]) -> list[float]:
    """Return a digest as six numbers below 2**16, whose squares add up exactly in float64."""
    content = digest(lines)
    return [float(int.from_bytes(content[2 * i : 2 * i + 2], "little")) for i in range(6)]


def cut_pieces(words: tf.Tensor, cut: Pieces) -> list[tf.Tensor]:
    """Return the pieces of a message, prefixed with its number of words; an empty piece has one word of padding."""
    count = tf.size(words, tf.int64)
    fits = tf.debugging.Assert(
        count < cut.pieces * cut.words, ["hvd_sparse: more words than fit into all pieces", count]
    )
    with tf.control_dependencies([fits]):
        message = tf.concat([count[None], words], 0)
    bounds = [tf.constant(piece * cut.words, tf.int64) for piece in range(cut.pieces + 1)]
    parts = [message[begin:end] for begin, end in itertools.pairwise(bounds)]
    return [tf.concat([part, tf.zeros([tf.cast(tf.equal(tf.size(part), 0), tf.int32)], tf.int64)], 0) for part in parts]


def join_pieces(gathered: list[tf.Tensor], ranks: int, cut: Pieces) -> tf.Tensor:
    """Return the ranks' messages, concatenated in rank order, without the numbers of words and the padding."""
    begins, parts = [tf.zeros([], tf.int64)] * cut.pieces, []
    for _ in range(ranks):
        left = 1 + gathered[0][begins[0]]
        for piece, words in enumerate(gathered):
            length = tf.minimum(left, cut.words)
            begin = begins[piece] + (piece == 0)
            parts.append(words[begin : begins[piece] + length])
            begins[piece] += tf.maximum(length, 1)
            left -= length
    return tf.concat(parts, 0)
