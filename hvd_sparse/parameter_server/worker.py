"""A worker: it accumulates gradients, pushes the largest updates, and applies answers (Algorithms 1 and 3).

Like the server, it is a state machine without I/O. The caller computes gradients at the parameters, which are arrays
that change in place when an answer arrives.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from hvd_sparse import native
from hvd_sparse.mailbox import DamagedMessage
from hvd_sparse.parameter_server import protocol
from hvd_sparse.parameter_server.layout import ParameterLayout, Piece
from hvd_sparse.parameter_server.methods import DCTAsync, Method
from hvd_sparse.parameter_server.protocol import Form, Kind, Message, PushCounters, Reason
from hvd_sparse.parameter_server.server import RESTORED, introduction
from hvd_sparse.parameter_server.updates import (
    KeptSelection,
    NotFinite,
    Update,
    groups_of,
    piece_segments,
    rounded,
    select,
    unpack,
)
from hvd_sparse.parameter_server.updates import pack as pack_update

Messages = dict[int, np.ndarray]
TRIES = 10  # after so many damaged messages, the damage is systematic


class ServerRefused(RuntimeError):
    """A server refuses this worker; the message says why."""


class Worker:
    """Worker `number`; it updates the model's parameters, {name: float32[n]}, in place.

    servers: the number of servers. incarnation: must differ after a restart, so that servers can detect it. restores:
    whether servers must have begun with the parameters of a file.
    """

    def __init__(
        self,
        number: int,
        layout: ParameterLayout,
        method: Method,
        parameters: Mapping[str, np.ndarray],
        servers: int = 1,
        incarnation: int = 0,
        restores: bool = False,
    ):
        self.number, self.layout, self.method, self.incarnation = number, layout, method, incarnation
        self.parameters = dict(parameters)
        self.shards, self._restores = layout.shards(servers), restores
        self.residual = np.zeros(layout.numel, np.float32)
        self.velocity = np.zeros(layout.numel, np.float32) if method.has_velocity else None
        self.traffic = PushCounters()
        self.sequence = 0  # number of the last push in this incarnation
        self.step = 0  # for the density schedule; continues when this worker joins again
        self.changed: set[str] = set()  # tensors changed by answers; the code that copies them clears this set
        self._pieces = layout.tensors()
        self._segments = piece_segments(self._pieces, 0)
        self._parts = {piece.name: slice(piece.begin, piece.end) for piece in self._pieces}
        self._shard_pieces = [layout.pieces(*shard) for shard in self.shards]
        self._shard_segments = [piece_segments(pieces, pieces[0].begin) for pieces in self._shard_pieces]
        self._clocks = [0] * servers
        self._joined: set[int] = set()
        self._waiting: set[int] = set()  # servers that have not answered the last message
        self._sent: Messages = {}
        self._awaited = Kind.HELLO  # the kind of the last message
        self._tries = self._rejoins = self._questions = 0
        self._unknown_to: set[int] = set()  # servers that no longer know this worker
        # The last update, and its destinations: after joining again, the servers that have not applied it.
        self._pushed: tuple[Update, set[int]] | None = None
        self.answers: dict[int, tuple[dict, dict[str, np.ndarray]]] = {}  # to the last request
        self._groups = groups_of(self._pieces, 0, method)
        # With per-tensor selection, selection and accumulation are one pass.
        is_alone = method.scope == "tensor"
        self._own_groups = dict(zip(self._parts, self._groups, strict=True)) if is_alone else {}
        self._kept: dict[str, KeptSelection] = {}  # of the tensors whose threshold is kept
        if isinstance(method, DCTAsync):
            names = [piece.name for piece in self._pieces if not piece.is_dense]
            self._kept = {name: KeptSelection(method, place, len(names)) for place, name in enumerate(names)}

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is missing."""
        return bool(self._waiting)

    @property
    def dense_bytes(self) -> int:
        """The bytes of all parameters, as in a dense push or a dense answer."""
        return 4 * self.layout.numel

    def part(self, name: str) -> slice:
        """Return the slice of a tensor in residual and velocity."""
        return self._parts[name]

    def feedback_of(self, name: str) -> dict[str, np.ndarray]:
        """Return a tensor's error feedback, in views.

        It has the residual, float32[n], and if the method has them, the velocity, float32[n], and the threshold,
        float64[2]: its value and its k, 0 for none.
        """
        feedback = {"residual": self.residual[self._parts[name]]}
        if self.velocity is not None:
            feedback["velocity"] = self.velocity[self._parts[name]]
        if name in self._kept:
            feedback["threshold"] = self._kept[name].state
        return feedback

    def check_feedback(self, arrays: Mapping[str, Mapping[str, np.ndarray]], method: str | None = None) -> None:
        """Raise ValueError if error feedback, {name: {kind: array}}, is of another method, or not finite.

        method: the name of the method that it is of; None: not known, as in states of earlier versions.
        """
        if method not in (None, self.method.name):
            raise ValueError(f"the state is of another method: {method} there, {self.method.name} here")
        for name, found in arrays.items():
            expected = {kind: part.size for kind, part in self.feedback_of(name).items()}
            sizes = {kind: np.size(part) for kind, part in found.items()}
            if sizes != expected:
                raise ValueError(f"the state of {name} must have {expected} elements, got {sizes}: of another method?")
            for kind, part in found.items():
                if not np.isfinite(part).all():
                    raise ValueError(f"the state of {name} must be finite, got NaN or infinity in its {kind}")

    def load_feedback(self, arrays: Mapping[str, Mapping[str, np.ndarray]], method: str | None = None) -> None:
        """Restore the error feedback of tensors; if `check_feedback` raises, nothing changes."""
        self.check_feedback(arrays, method)
        for name, found in arrays.items():
            for kind, part in self.feedback_of(name).items():
                part[:] = np.reshape(found[kind], -1)

    def hello(self) -> Messages:
        """Return the first message to each server, which answers with the parameters."""
        lines = introduction(self.layout, self.method, len(self.shards)) + [RESTORED] * self._restores
        body = protocol.as_body("\n".join(lines))
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
        """Accumulate gradients, {name: float32[n]}, and return the push for each server.

        The residual of a tensor without a gradient does not change, but takes part in the selection. lr, weight_decay:
        of each tensor. Elements that are not finite count as zero. Raises RuntimeError while an answer is missing.
        """
        if self._waiting or len(self._joined) < len(self.shards):
            raise RuntimeError("the servers have not answered yet: wait for their answers before the next push")
        decay = weight_decay or {}
        density = self.method.schedule.density(self.step)
        found = [self._accumulate(piece, gradients.get(piece.name), lr, decay, density) for piece in self._pieces]
        update = self._selected(found, density)
        self._take(update, density)
        self.sequence += 1
        self.step += 1
        self.traffic.pushes += 1
        self.traffic.entries_up += update.values.size
        self._pushed = (update, set(range(len(self.shards))))
        return self._send(Kind.PUSH, self._cut(*self._pushed))

    def receive(self, server: int, data: np.ndarray) -> Messages:
        """Process a message from a server; return the messages to send: repeated after damage, or to join again.

        Raises ServerRefused if a repetition cannot help.
        """
        try:
            message = protocol.decode(data)
            if message.kind == Kind.STATE:
                return self._store_answer(server, message)
            self.traffic.bytes_down += data.size
            if message.kind == Kind.REFUSED and message.incarnation in (0, self.incarnation):
                return self._refused(server, message)
            if message.incarnation != self.incarnation:
                return {}  # an answer to a previous incarnation
            if message.kind == Kind.WELCOME:
                return self._welcomed(server, message)
            return self._replied(server, message) if message.kind == Kind.REPLY else {}
        except NotFinite as error:
            raise ServerRefused(f"in the answer of server {server}, {error}") from error
        except DamagedMessage as error:
            return self._again(server, str(error))

    def alive(self) -> Messages:
        """Return an ALIVE message for each server."""
        return {server: self._encoded(Kind.ALIVE) for server in range(len(self.shards))}

    def share(self, buffers: np.ndarray) -> Messages:
        """Return a message with float32 buffers for the first server, which averages them over workers."""
        return self._counted({0: self._encoded(Kind.BUFFERS, body=buffers.view(np.uint8))})

    def ask(self, what: str) -> Messages:
        """Return a request for each server, such as "state" or "statistics"; `answers` then collects their answers."""
        self._questions, self.answers = self._questions + 1, {}
        question = self._encoded(Kind.ASK, k=self._questions, body=protocol.as_body(what))
        return self._await(Kind.ASK, dict.fromkeys(range(len(self.shards)), question))

    def leave(self, why: str = "") -> Messages:
        """Return the last message to each server."""
        self._waiting.clear()
        return {server: self._encoded(Kind.LEAVE, body=protocol.as_body(why)) for server in range(len(self.shards))}

    def _accumulate(self, piece: Piece, gradient, lr, weight_decay, density: float) -> np.ndarray | None:
        """Accumulate a tensor's gradient, if any; with per-tensor selection, return the selected indices."""
        residual, group = self.residual[piece.begin : piece.end], self._own_groups.get(piece.name)
        kept = self._kept.get(piece.name)
        k = 0 if group is None or density >= 1.0 else group.count(density)  # 0: not selected alone
        is_part = 0 < k < residual.size
        arrays, rule = ((), {}) if gradient is None else self._addition(piece, gradient, lr, weight_decay)
        if is_part and kept is None and gradient is not None:
            return group.select(k, partial(self._accumulate_top_k, *arrays, **rule))  # accumulates, too
        if gradient is not None:
            self.traffic.non_finite += not native.accumulate(*arrays, **rule)
        if is_part:
            top_k = partial(native.select_top_k, residual)
            return group.select(k, top_k) if kept is None else piece.begin + kept.select(residual, k, self.step)
        if kept is not None:
            kept.miss(self.step)
        return np.arange(piece.begin, piece.end) if k else None

    def _addition(self, piece: Piece, gradient, lr, weight_decay) -> tuple[tuple, dict]:
        """Return the arguments and options of the native functions that accumulate a tensor's gradient."""
        part = slice(piece.begin, piece.end)
        rate, decay = lr[piece.name], lr[piece.name] * weight_decay.get(piece.name, 0.0)
        arrays = (gradient, self.residual[part], None if self.velocity is None else self.velocity[part])
        rule = {"factor": rate, "weight_decay": decay, "parameter": self.parameters[piece.name] if decay else None}
        if self.method.has_velocity:
            rule |= {"momentum": self.method.momentum, "nesterov": self.method.nesterov}
        return arrays, rule

    def _accumulate_top_k(self, *arrays, **rule) -> tuple:
        *selected, is_finite = native.accumulate_top_k(*arrays, **rule)
        self.traffic.non_finite += not is_finite
        return tuple(selected)

    def _selected(self, found: list[np.ndarray] | None, density: float) -> Update:
        """Return the selected update, rounded to its wire type. found: each tensor's indices if selected per tensor."""
        if density >= 1.0:
            update = Update(None, self.residual.copy())
        else:
            indices = np.concatenate(found) if self._own_groups else select(self.residual, self._groups, density)
            update = Update(indices, self.residual[indices])
        return rounded(update, self.method, self.method.values, self._segments)

    def _take(self, update: Update, density: float) -> None:
        """Subtract the sent values from the residual (SAMomentum retains a fraction), and mask the velocity.

        Where every element of a group is sent, none is delayed, and momentum needs no masking (DGC, section 3.3).
        """
        self.residual[update.at] -= update.values
        if self.method.retained:
            self.residual[update.at] += np.float32(self.method.retained) * update.values
        if self.method.masks_velocity and density < 1.0:
            for group in self._groups:
                if group.count(density) < group.end - group.begin:
                    first, last = np.searchsorted(update.indices, (group.begin, group.end))
                    self.velocity[update.indices[first:last]] = 0.0

    def _cut(self, update: Update, servers: set[int]) -> Messages:
        """Return a push for each server: for `servers`, the entries in their shards; for the others, no entries."""
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
        """Store messages that need an answer, to repeat them after damage."""
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
        """Record that a server no longer knows this worker; join again when all other servers have answered.

        Not before: after joining again, an outstanding answer would no longer tell whether its update was applied.
        """
        if message.incarnation != self.incarnation or not self._is_of_push(server, message):
            return {}  # a refusal of a message that needs no answer, or has had one
        update, servers = self._pushed
        self._pushed = (update, servers - {server} if message.k == self.sequence else servers)
        self._unknown_to.add(server)
        return self._rejoin(message.text)

    def _rejoin(self, why: str) -> Messages:
        """Join all servers again, if no other answer is missing; updates not yet applied are pushed again."""
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
        has_answered_push = self.sequence > 1 or (self.sequence == 1 and server not in self._waiting)
        if has_answered_push or message.clock < self._clocks[server] or message.body.size != 4 * (end - begin):
            return {}
        self._write(server, Update(None, message.body.copy().view(np.float32)), Form.VALUES)
        self._clocks[server] = message.clock
        if server in self._joined:
            return {}  # the answer to a repeated HELLO
        self._joined.add(server)
        self._waiting.discard(server)
        if self._waiting or self._pushed is None:
            return {}
        self.sequence = 1
        return self._send(Kind.PUSH, self._cut(*self._pushed))

    def _store_answer(self, server: int, message: Message) -> Messages:
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
        """Return whether a message is the first answer to the outstanding push."""
        return self._awaited == Kind.PUSH and message.sequence == self.sequence and server in self._waiting

    def _write(self, server: int, update: Update, form: Form) -> None:
        """Set the parameters of a server's shard, or add differences to them."""
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
