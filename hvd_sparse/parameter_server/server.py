"""A server: it stores a shard of the parameters, applies pushes, and answers with changed elements (Algorithm 2).

It is a state machine without I/O: `handle` processes a message and returns the messages to send. So the same code runs
over MPI, in a thread, and in a simulation.
"""

import collections
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hvd_sparse import native_changes
from hvd_sparse._version import __version__
from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.parameter_server import protocol
from hvd_sparse.parameter_server.layout import RENAMED, ParameterLayout, is_renamed
from hvd_sparse.parameter_server.methods import Method
from hvd_sparse.parameter_server.protocol import Kind, Message, Reason
from hvd_sparse.parameter_server.tracker import ChangeTracker, MirrorTracker
from hvd_sparse.parameter_server.updates import NotFinite, Update, piece_segments, unpack

RESTORED = "restore = a file"  # what a worker says that was started with one; its servers must have been, too
MOST_DIFFERENCES = 10  # of each side, in an error
Outgoing = list[tuple[int, np.ndarray]]


@dataclass
class Record:
    """A server's state of a worker that has joined."""

    incarnation: int
    sequence: int = 0  # of the last push
    answer: np.ndarray | None = None  # to the last push, if it cannot be computed again
    seen: float = 0.0


@dataclass
class Statistics:
    """A server's counters: pushes, refused and repeated messages, bytes in and out, staleness of pushes."""

    pushes: int = 0
    refused: int = 0
    repeated: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    staleness: collections.Counter = field(default_factory=collections.Counter)


class Server:
    """Stores elements [begin, end) of a model, float32, copied from `parameters`, which are those of the whole model.

    shard: begin and end. workers: their number; `is_finished` is true when all have joined and left. silence: seconds
    without a message after which a worker counts as dead; None: never. others: the number of other ranks that serve, of
    which each will request `parameters` as its initial ones; they are stored until then. servers: the number of all
    shards. restored: whether `parameters` are from a file. refused: the workers that a server on this rank has refused,
    and why; all of these share it. now: returns the time.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        shard: tuple[int, int],
        method: Method,
        parameters: np.ndarray,
        workers: int,
        silence: float | None = None,
        others: int = 0,
        servers: int = 1,
        restored: bool = False,
        refused: dict[int, str] | None = None,
        now=time.monotonic,
    ):
        self.layout, self.shard, self.method = layout, shard, method
        self.parameters = parameters[shard[0] : shard[1]].copy()
        self.clock = 0
        self.statistics = Statistics()
        self.buffers = np.empty(0, np.float32)
        self.departures: dict[int, str] = {}  # workers that left, and why; "" after a normal end
        self.refused = {} if refused is None else refused
        self._workers, self.silence, self._now, self._started = workers, silence, now, now()
        self._records: dict[int, Record] = {}
        self._last: dict[int, tuple[int, int]] = {}  # incarnation and last push of workers without a record
        self._others, self._start = others, parameters if others else None
        self._introduction, self._restored = introduction(layout, method, servers), restored
        pieces = layout.pieces(*shard)
        self._segments = piece_segments(pieces, shard[0])
        if method.is_mirrored:
            self._tracker = MirrorTracker(self.parameters, method, pieces, shard[0])
        else:
            self._tracker = ChangeTracker(self.parameters, method)

    @property
    def numel(self) -> int:
        """The number of elements of this server."""
        return self.parameters.size

    @property
    def nbytes(self) -> int:
        """The bytes of parameters, tracker and stored answers."""
        answers = sum(record.answer.nbytes for record in self._records.values() if record.answer is not None)
        start = 0 if self._start is None else self._start.nbytes
        return self.parameters.nbytes + self._tracker.nbytes + answers + start

    @property
    def is_occupied(self) -> bool:
        """Whether any worker has joined and not left."""
        return bool(self._records)

    @property
    def is_finished(self) -> bool:
        """Whether all workers have joined and left."""
        return len({*self.departures, *self.refused}) == self._workers and not self._records

    def handle(self, data: np.ndarray, source: int) -> Outgoing:
        """Process a message from rank `source`; return (destination, message) pairs. Invalid ones change no state."""
        self.statistics.bytes_in += data.size
        try:
            message = protocol.decode(data)
            if message.kind != Kind.ASK and message.worker != source:
                raise DamagedMessage(f"it came from rank {source}, and says that it is of {message.worker}")
            answer = self._answer(message)
        except NotFinite as error:
            answer = self._refusal(Reason.WRONG, message, f"in a push of worker {source}, {error}")
        except DamagedMessage as error:
            answer = self._refusal(Reason.DAMAGED, Message(Kind.REFUSED), str(error))
        if answer is None:
            return []
        encoded = answer if isinstance(answer, np.ndarray) else protocol.encode(answer)
        self.statistics.bytes_out += encoded.size
        return [(source, encoded)]

    def _answer(self, message: Message) -> Message | np.ndarray | None:
        if message.kind == Kind.HELLO:
            return self._welcome(message)
        if message.kind == Kind.ASK:
            return self._tell(message)
        record = self._records.get(message.worker)
        if record is None or record.incarnation != message.incarnation:
            if message.kind in (Kind.ALIVE, Kind.LEAVE):
                return None
            return self._refusal(Reason.UNKNOWN_WORKER, message, "say HELLO first: this server does not know you")
        record.seen = self._now()
        if message.kind == Kind.PUSH:
            return self._push(message, record)
        if message.kind == Kind.BUFFERS:
            self._average(message)
        elif message.kind == Kind.LEAVE:
            self._forget(message.worker, message.text)
        elif message.kind != Kind.ALIVE:
            raise DamagedMessage(f"servers accept no message of kind {message.kind.name}")
        return None

    def _welcome(self, message: Message) -> Message | None:
        known = self._records.get(message.worker)
        last = (known.incarnation, known.sequence) if known else self._last.get(message.worker, (0, 0))
        if last[0] == message.incarnation and last[1] > 0:
            return None  # a repeated HELLO
        theirs = message.text.split("\n")
        ours = [*self._introduction, RESTORED] if self._restored and RESTORED in theirs else self._introduction
        differences = differing(theirs, ours)
        if not 0 <= message.worker < self._workers:
            return self._refusal(Reason.WRONG, message, f"there are {self._workers} workers, not {message.worker}")
        if differences:
            text = f"worker {message.worker} and this server differ: {differences}"
            if known is None:  # `is_finished` does not wait for it
                self.departures[message.worker] = self.refused[message.worker] = text
            return self._refusal(Reason.WRONG, message, text)
        if known and known.incarnation != message.incarnation:
            self._last[message.worker] = (known.incarnation, known.sequence)
        self._records[message.worker] = Record(message.incarnation, seen=self._now())
        self.departures.pop(message.worker, None)
        self.refused.pop(message.worker, None)
        self._tracker.join(message.worker)
        return Message(
            Kind.WELCOME, message.worker, message.incarnation, clock=self.clock, body=self.parameters.view(np.uint8)
        )

    def _tell(self, message: Message) -> np.ndarray:
        """Answer a request: "statistics", "buffers", "state", or "start" for the whole model's initial parameters."""
        description, arrays = self.state()
        if message.text == "start" and self._others > 0:
            arrays = {"parameters": self._start}
            self._others -= 1
            self._start = self._start if self._others else None
        elif message.text == "statistics":
            arrays = {}
        elif message.text == "buffers":
            del arrays["parameters"]
        elif message.text != "state":
            raise DamagedMessage(f"there is no answer to {message.text!r}")
        fields = (message.worker, message.incarnation, message.sequence, self.clock, message.k)
        return protocol.encode_state(Message(Kind.STATE, *fields), description, arrays)

    def _push(self, message: Message, record: Record) -> Message | np.ndarray | None:
        if message.sequence == record.sequence and message.sequence > 0:
            self.statistics.repeated += 1
            return self._reply(message) if record.answer is None else record.answer
        if 0 < message.sequence < record.sequence:
            self.statistics.repeated += 1
            return None  # the worker has received the answer, as it has pushed again
        if message.sequence != record.sequence + 1 or message.clock > self.clock:
            text = f"push {message.sequence} at clock {message.clock} is out of turn: {record.sequence} was the last"
            return self._refusal(Reason.WRONG, message, text)
        update = self._unpack(message)
        self.statistics.staleness[self.clock - message.clock] += 1
        self.statistics.pushes += 1
        self._apply(update)
        record.sequence, record.answer = message.sequence, None
        reply = self._reply(message)
        if self._tracker.form == protocol.Form.DIFFERENCES:
            record.answer = reply
        return reply

    def _unpack(self, message: Message) -> Update:
        """Return the update of a push; raise DamagedMessage if its payload is invalid."""
        return unpack(message, self.numel, self.method.coding, self.method.values, self._segments)

    def _apply(self, update: Update) -> None:
        """M <- M - s, on the parameters: the initial parameters and the sum of updates are stored as one array."""
        self.clock += 1
        self._tracker.apply(update, self.clock)

    def _reply(self, message: Message) -> np.ndarray:
        k, encoded = self._tracker.answer(message.worker, message.clock)
        fields = (message.worker, message.incarnation, message.sequence, self.clock, k)
        body = encoded[protocol.HEADER_BYTES :]
        is_payload = 0 < k < self.numel
        check = native_changes.sealed_crc(body) if is_payload else None
        return protocol.seal(encoded, Message(Kind.REPLY, *fields, form=self._tracker.form), check)

    def _average(self, message: Message) -> None:
        """Move the buffers towards a worker's by 1/N of the difference, for N workers that have joined.

        Those that have left count, too: otherwise the last one's buffers would replace the average. Equal elements stay
        as they are, such as the infinities of an attention mask; so do those for which the worker has NaN or infinity,
        as after a batch with NaN.
        """
        if message.body.size % 4:
            raise DamagedMessage(f"{message.body.size} bytes are no float32")
        theirs = message.body.copy().view(np.float32)
        ours = self.buffers if self.buffers.size else theirs
        if ours.size != theirs.size:
            raise DamagedMessage(f"{theirs.size} elements of buffers, where others have {ours.size}")
        joined = {*self._records, *self.departures} - {*self.refused}
        part = np.float32(1.0 / len(joined))
        with np.errstate(invalid="ignore"):
            mixed = ours * (np.float32(1.0) - part) + theirs * part
        mixed = np.where(np.isfinite(ours), mixed, theirs)
        self.buffers = np.where(np.isfinite(theirs) & (ours != theirs), mixed, ours)

    def _refusal(self, reason: Reason, message: Message, text: str) -> Message:
        """Return a refusal; for a worker of the last incarnation known, k is the last applied push."""
        self.statistics.refused += 1
        incarnation, last = self._last.get(message.worker, (0, 0))
        applied = last if incarnation == message.incarnation else 0
        fields = (message.worker, message.incarnation, message.sequence, self.clock, applied)
        return Message(Kind.REFUSED, *fields, reason=reason, body=protocol.as_body(text))

    def _forget(self, worker: int, why: str) -> None:
        record = self._records.pop(worker)
        self._last[worker] = (record.incarnation, record.sequence)
        self._tracker.leave(worker)
        self.departures[worker] = why

    def hear(self, worker: int) -> None:
        """Count a message of a worker that is on its way as a sign of life."""
        if worker in self._records:
            self._records[worker].seen = self._now()

    def excuse(self, seconds: float) -> None:
        """Do not count `seconds`, in which this server read no messages, as silence of workers."""
        for record in self._records.values():
            record.seen += seconds

    def tick(self) -> list[int]:
        """Remove the workers that have been silent for too long; return them."""
        if self.silence is None:
            return []
        limit = self._now() - self.silence
        dead = [worker for worker, record in self._records.items() if record.seen < limit]
        for worker in dead:
            self._forget(worker, f"no sign of life for {self.silence:g} seconds")
        return dead

    def state(self) -> tuple[dict, dict[str, np.ndarray]]:
        """Return a description, with the statistics, and arrays: the server's state."""
        staleness = {str(stale): count for stale, count in sorted(self.statistics.staleness.items())}
        description = {
            "shard": list(self.shard),
            "clock": self.clock,
            "layout": self.layout.digest(),
            "restored": self._restored,
            "workers": sorted(self._records),
            "departures": {str(worker): why for worker, why in self.departures.items()},
            "memory_bytes": self.nbytes,
            "seconds": self._now() - self._started,
            **vars(self.statistics),
            "staleness": staleness,
        }
        return description, {"parameters": self.parameters, "buffers": self.buffers}


def introduction(layout: ParameterLayout, method: Method, servers: int = 1) -> list[str]:
    """Return one line for each setting that must be equal on a worker and its servers; `servers` is their number."""
    model = [
        f"servers times threads = {servers}",
        f"tensors = {len(layout.names)}",
        f"elements = {layout.numel}",
        f"layout = {layout.digest()}",
        f"frozen parameters = {layout.frozen}",
    ]
    tensors = [f"tensor {name} = {list(shape)}" for name, shape in layout.shapes.items()]
    return [f"hvd_sparse = {__version__}", *model, *method.describe(), *tensors]


def differing(theirs: list[str], ours: list[str]) -> str:
    """Return a description of the first differences of two introductions; an empty string if there are none."""
    in_ours, in_theirs = set(ours), set(theirs)
    there, here = [line for line in theirs if line not in in_ours], [line for line in ours if line not in in_theirs]
    shapes = [dict(line.split(" = ", 1) for line in side if line.startswith("tensor ")) for side in (there, here)]
    what = [RENAMED] if is_renamed(*shapes) else []
    what += [f"{line} there" for line in there[:MOST_DIFFERENCES]]
    return "; ".join(what + [f"{line} here" for line in here[:MOST_DIFFERENCES]])


def departures(servers: Iterable[Server]) -> dict[int, str]:
    """Return the workers that left the servers of a rank, and why."""
    return first_reasons(dict(server.departures) for server in servers)  # copies: threads may still change them


def first_reasons(departures: Iterable[Mapping[int, str]]) -> dict[int, str]:
    """Return the workers that left any of several servers, and the first reason that one of these has."""
    found: dict[int, str] = {}
    for own in departures:
        for worker, why in own.items():
            found[worker] = found.get(worker) or why
    return found


def report_departures(servers: Iterable[Server]) -> None:
    """Print the workers that left early, and why."""
    for worker, why in departures(servers).items():
        if why:
            print(f"hvd_sparse: worker {worker} left early: {why}", file=sys.stderr)
