"""A worker: it accumulates gradients, pushes the largest updates, and applies answers (Algorithms 1 and 3).

Like the server it is a state machine without input or output of its own. Parameters are arrays that the caller reads
gradients at, and that change in place when an answer arrives.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from hvd_sparse import native
from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.parameter_server import protocol
from hvd_sparse.parameter_server.layout import ParameterLayout, Piece
from hvd_sparse.parameter_server.methods import Method
from hvd_sparse.parameter_server.protocol import Form, Kind, Message, Reason
from hvd_sparse.parameter_server.server import introduction
from hvd_sparse.parameter_server.updates import Update, groups_of, rounded, segments_of, select, unpack
from hvd_sparse.parameter_server.updates import pack as pack_update

Messages = dict[int, np.ndarray]
TRIES = 10  # a message that always arrives damaged is no accident


class ServerRefused(RuntimeError):
    """A server does not heed this worker; the text says why, and what differs."""


@dataclass
class PushCounters:
    """Bytes and counts of a worker: messages with their headers."""

    pushes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    entries_up: int = 0
    entries_down: int = 0
    repeated: int = 0
    non_finite: int = 0


class Worker:
    """Worker `number`, of a model whose parameters, {name: float32[n]}, it keeps up to date in place.

    servers: how many share the model. incarnation: another one after a restart, so that servers can tell.
    """

    def __init__(
        self,
        number: int,
        layout: ParameterLayout,
        method: Method,
        parameters: Mapping[str, np.ndarray],
        servers: int = 1,
        incarnation: int = 0,
    ):
        self.number, self.layout, self.method, self.incarnation = number, layout, method, incarnation
        self.parameters = dict(parameters)
        self.shards = layout.shards(servers)
        self.residual = np.zeros(layout.numel, np.float32)
        self.velocity = np.zeros(layout.numel, np.float32) if method.has_velocity else None
        self.traffic = PushCounters()
        self.sequence = 0  # of the last push in this incarnation
        self.step = 0  # what the density's schedule goes by; it stays when this worker joins again
        self.changed: set[str] = set()  # tensors that answers have written to; whoever copies them clears it
        self._pieces = layout.tensors()
        self._segments = segments_of(self._pieces, 0)
        self._parts = {piece.name: slice(piece.begin, piece.end) for piece in self._pieces}
        self._shard_pieces = [layout.pieces(*shard) for shard in self.shards]
        self._shard_segments = [segments_of(pieces, pieces[0].begin) for pieces in self._shard_pieces]
        self._clocks = [0] * servers
        self._joined: set[int] = set()
        self._waiting: set[int] = set()  # servers whose answer to the last message is not there yet
        self._sent: Messages = {}
        self._awaited = Kind.HELLO  # the kind of what was sent
        self._tries = self._rejoins = self._questions = 0
        self._unknown_to: set[int] = set()  # servers that have forgotten this worker, and have not applied its push
        # The last update, and the servers that it is for: after joining again, those that have not applied it.
        self._pushed: tuple[Update, set[int]] | None = None
        self.answers: dict[int, tuple[dict, dict[str, np.ndarray]]] = {}  # to the last question
        self._groups = groups_of(self._pieces, 0, method)
        # Where each tensor is selected from on its own, that is done while its gradient is accumulated.
        is_alone = method.scope == "tensor"
        self._own_groups = dict(zip(self._parts, self._groups, strict=True)) if is_alone else {}

    @property
    def is_waiting(self) -> bool:
        """Whether a server has not answered yet."""
        return bool(self._waiting)

    @property
    def dense_bytes(self) -> int:
        """The bytes of all parameters: what a dense push is, and a dense answer."""
        return 4 * self.layout.numel

    def part(self, name: str) -> slice:
        """Return where a tensor lies in the memory."""
        return self._parts[name]

    def memory(self) -> dict[str, np.ndarray]:
        """Return residual, and velocity if the method has one, float32[numel] each."""
        return {"residual": self.residual} | ({} if self.velocity is None else {"velocity": self.velocity})

    def hello(self) -> Messages:
        """Return what to say to each server first; its answer brings the parameters."""
        body = protocol.as_body("\n".join(introduction(self.layout, self.method)))
        self._joined.clear()
        self._unknown_to.clear()
        self._clocks = [0] * len(self.shards)
        hello = self._encoded(Kind.HELLO, body=body)
        return self._send(Kind.HELLO, dict.fromkeys(range(len(self.shards)), hello))

    def push(
        self,
        gradients: Mapping[str, np.ndarray],
        lr: Mapping[str, float],
        weight_decay: Mapping[str, float] | None = None,
    ) -> Messages:
        """Accumulate gradients, {name: float32[n]}, and return what to send to each server.

        The residual of a tensor without a gradient stays as it is, and takes part in the selection. lr, weight_decay:
        of each tensor. What is not finite counts as zero. Raises RuntimeError while an answer is missing.
        """
        if self._waiting or len(self._joined) < len(self.shards):
            raise RuntimeError("the servers have not answered yet: wait for what they send, then push")
        decay = weight_decay or {}
        density = self.method.schedule.density(self.step)
        found = [self._accumulate(piece, gradients.get(piece.name), lr, decay, density) for piece in self._pieces]
        update = self._selected(found, density)
        self._take(update)
        self.sequence += 1
        self.step += 1
        self.traffic.pushes += 1
        self.traffic.entries_up += update.values.size
        self._pushed = (update, set(range(len(self.shards))))
        return self._send(Kind.PUSH, self._cut(*self._pushed))

    def receive(self, server: int, data: np.ndarray) -> Messages:
        """Take what a server sent; return what to send again, if it did not arrive as it should.

        Raises ServerRefused where there is no use in trying again.
        """
        try:
            message = protocol.decode(data)
            if message.kind == Kind.STATE:
                return self._told(server, message)
            self.traffic.bytes_down += data.size
            if message.kind == Kind.REFUSED and message.incarnation in (0, self.incarnation):
                return self._refused(server, message)
            if message.incarnation != self.incarnation:
                return {}  # an answer to a previous incarnation
            if message.kind == Kind.WELCOME:
                return self._welcomed(server, message)
            return self._replied(server, message) if message.kind == Kind.REPLY else {}
        except DamagedMessage as error:
            return self._again(server, str(error))

    def alive(self) -> Messages:
        """Return a sign of life for each server."""
        return {server: self._encoded(Kind.ALIVE) for server in range(len(self.shards))}

    def share(self, buffers: np.ndarray) -> Messages:
        """Return what brings float32 buffers to the first server, which averages them over workers."""
        return self._counted({0: self._encoded(Kind.BUFFERS, body=buffers.view(np.uint8))})

    def ask(self, what: str) -> Messages:
        """Return what to ask each server, "state" or "statistics"; `answers` has what they say, once all have."""
        self._questions, self.answers = self._questions + 1, {}
        question = self._encoded(Kind.ASK, k=self._questions, body=protocol.as_body(what))
        return self._await(Kind.ASK, dict.fromkeys(range(len(self.shards)), question))

    def leave(self, why: str = "") -> Messages:
        """Return the last message to each server."""
        self._waiting.clear()
        return {server: self._encoded(Kind.LEAVE, body=protocol.as_body(why)) for server in range(len(self.shards))}

    def _accumulate(self, piece: Piece, gradient, lr, weight_decay, density: float) -> np.ndarray | None:
        """Bring a tensor's gradient, if any, into the memory; return what is selected of it, if it is on its own."""
        part, group = slice(piece.begin, piece.end), self._own_groups.get(piece.name)
        residual = self.residual[part]
        is_alone = group is not None and density < 1.0
        if gradient is None:
            return group.select(group.count(density), partial(native.select_top_k, residual)) if is_alone else None
        rate, decay = lr[piece.name], lr[piece.name] * weight_decay.get(piece.name, 0.0)
        memory = (gradient, residual, None if self.velocity is None else self.velocity[part])
        rule = {"factor": rate, "weight_decay": decay, "parameter": self.parameters[piece.name] if decay else None}
        if self.method.has_velocity:
            rule |= {"momentum": self.method.momentum, "nesterov": self.method.nesterov}
        if is_alone and (k := group.count(density)) < residual.size:
            return group.select(k, partial(self._accumulate_top_k, *memory, **rule))
        self.traffic.non_finite += not native.accumulate(*memory, **rule)
        return np.arange(piece.begin, piece.end) if is_alone else None

    def _accumulate_top_k(self, *memory, **rule) -> tuple:
        *selected, is_finite = native.accumulate_top_k(*memory, **rule)
        self.traffic.non_finite += not is_finite
        return tuple(selected)

    def _selected(self, found: list[np.ndarray] | None, density: float) -> Update:
        """Return what was selected of the residual, as it survives the wire. found: of each tensor, if alone."""
        if density >= 1.0:
            update = Update(None, self.residual.copy())
        else:
            indices = np.concatenate(found) if self._own_groups else select(self.residual, self._groups, density)
            update = Update(indices, self.residual[indices])
        return rounded(update, self.method, self.method.values, self._segments)

    def _take(self, update: Update) -> None:
        """Take what is sent out of the memory: all of it, or for SAMomentum, what the momentum leaves."""
        self.residual[update.at] -= update.values
        if self.method.retained:
            self.residual[update.at] += np.float32(self.method.retained) * update.values
        if self.method.masks_velocity:
            self.velocity[update.at] = 0.0

    def _cut(self, update: Update, servers: set[int]) -> Messages:
        """Return a push for each server: to `servers`, of the entries that lie in their shards; of none to others."""
        messages = {}
        for server, (begin, end) in enumerate(self.shards):
            part = update.part(begin, end) if server in servers else Update(np.empty(0, np.int64), update.values[:0])
            k, body = pack_update(
                part, end - begin, self.method.coding, self.method.values, self._shard_segments[server]
            )
            messages[server] = self._encoded(Kind.PUSH, clock=self._clocks[server], k=k, body=body)
        return messages

    def _encoded(self, kind: Kind, **fields) -> np.ndarray:
        return protocol.encode(Message(kind, self.number, self.incarnation, self.sequence, **fields))

    def _counted(self, messages: Messages) -> Messages:
        self.traffic.bytes_up += sum(message.size for message in messages.values())
        return messages

    def _send(self, kind: Kind, messages: Messages) -> Messages:
        return self._counted(self._await(kind, messages))

    def _await(self, kind: Kind, messages: Messages) -> Messages:
        """Keep what must be answered, to send it again where it was damaged."""
        self._awaited, self._sent, self._waiting, self._tries = kind, messages, set(messages), 0
        return dict(messages)

    def _again(self, server: int, why: str) -> Messages:
        if server not in self._waiting:
            return {}
        self._tries += 1
        if self._tries > TRIES * len(self.shards):
            raise ServerRefused(f"server {server}: nothing arrives undamaged after {TRIES} tries: {why}")
        self.traffic.repeated += 1
        return self._counted({server: self._sent[server]})

    def _refused(self, server: int, message: Message) -> Messages:
        if message.reason == Reason.DAMAGED:
            return self._again(server, message.text)
        if message.reason == Reason.UNKNOWN_WORKER:
            return self._forgotten(server, message)
        raise ServerRefused(f"server {server}: {message.text}")

    def _forgotten(self, server: int, message: Message) -> Messages:
        """Take note that a server has forgotten this worker; join again when all others have answered.

        Not before: of an answer on its way nobody could say any more whether it is to an update that was applied.
        """
        if message.incarnation != self.incarnation or not self._is_of_push(server, message):
            return {}  # to what needs no answer, or to what had one
        update, servers = self._pushed
        self._pushed = (update, servers - {server} if message.k == self.sequence else servers)
        self._unknown_to.add(server)
        return self._rejoin(message.text)

    def _rejoin(self, why: str) -> Messages:
        """Begin anew with all servers, if no answer is open; what was not applied yet is pushed again."""
        if self._waiting != self._unknown_to:
            return {}
        self._rejoins += 1
        if self._rejoins > TRIES:
            raise ServerRefused(f"servers {sorted(self._unknown_to)}, after {TRIES} attempts to join again: {why}")
        self._pushed = (self._pushed[0], self._pushed[1] & self._unknown_to)
        self.incarnation += 1
        self.sequence = 0
        return self.hello()

    def _welcomed(self, server: int, message: Message) -> Messages:
        begin, end = self.shards[server]
        is_late = self.sequence > 0 and not (self.sequence == 1 and server in self._waiting)
        if is_late or message.clock < self._clocks[server] or message.body.size != 4 * (end - begin):
            return {}
        self._write(server, Update(None, message.body.copy().view(np.float32)), Form.VALUES)
        self._clocks[server] = message.clock
        if server in self._joined:
            return {}  # it has answered a HELLO that came twice
        self._joined.add(server)
        self._waiting.discard(server)
        if self._waiting or self._pushed is None:
            return {}
        self.sequence = 1
        return self._send(Kind.PUSH, self._cut(*self._pushed))

    def _told(self, server: int, message: Message) -> Messages:
        if self._awaited == Kind.ASK and message.k == self._questions and message.incarnation == self.incarnation:
            self.answers[server] = protocol.decode_state(message.body)
            self._waiting.discard(server)
        return {}

    def _replied(self, server: int, message: Message) -> Messages:
        if not self._is_of_push(server, message):
            return {}  # an answer that has already been applied
        begin, end = self.shards[server]
        update = unpack(message, end - begin, self.method.coding, self.method.pull_values, self._shard_segments[server])
        self.traffic.entries_down += update.values.size
        self._write(server, update, message.form)
        self._clocks[server] = message.clock
        self._waiting.discard(server)
        if not self._waiting:
            self._rejoins = 0
        return self._rejoin("forgotten") if self._unknown_to else {}

    def _is_of_push(self, server: int, message: Message) -> bool:
        """Whether a message is the first answer to the push that is open."""
        return self._awaited == Kind.PUSH and message.sequence == self.sequence and server in self._waiting

    def _write(self, server: int, update: Update, form: Form) -> None:
        """Set the parameters of a server's shard, or add to them."""
        begin = self.shards[server][0]
        for piece in self._shard_pieces[server]:
            part = update.part(piece.begin - begin, piece.end - begin)
            if part.values.size == 0:
                continue
            first = self.part(piece.name).start
            target = self.parameters[piece.name][piece.begin - first : piece.end - first]
            if form == Form.VALUES:
                target[part.at] = part.values
            else:
                target[part.at] += part.values
            self.changed.add(piece.name)
