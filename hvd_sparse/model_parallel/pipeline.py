"""One stage of a pipeline: its schedule of computation and messages. Frameworks derive from `Pipeline`."""

import abc
from collections import deque
from collections.abc import Mapping

import numpy as np

from hvd_sparse._version import __version__
from hvd_sparse.checks import check_choice, check_seconds, checked_integer
from hvd_sparse.finalization import is_end
from hvd_sparse.library import checked_communicator
from hvd_sparse.log import Logged
from hvd_sparse.model_parallel import message, tree
from hvd_sparse.model_parallel.arguments import Reduction, check_reduction, check_targets, checked_rows
from hvd_sparse.model_parallel.batch import Batch, MicroBatch
from hvd_sparse.model_parallel.channel import Channel
from hvd_sparse.model_parallel.message import CALL, MOST_MICRO_BATCHES, TARGETS_FOLLOW, Head, Kind, Tensor
from hvd_sparse.model_parallel.notices import PipelineError
from hvd_sparse.model_parallel.output_boundaries import OutputBoundaries
from hvd_sparse.model_parallel.schedule import FORWARD, SCHEDULES, Schedule, split_rows
from hvd_sparse.model_parallel.traffic import PipelineTraffic
from hvd_sparse.timeouts import TIMEOUT_SECONDS
from hvd_sparse.traffic import PipelineStats

TIMEOUT = TIMEOUT_SECONDS


class Pipeline(Logged, OutputBoundaries, abc.ABC):
    """A stage that runs micro-batches, on one rank of a communicator; see the frameworks' `Pipeline`."""

    PREFIX = "pipeline"

    def __init__(
        self,
        stage,
        boundary,
        boundaries,
        communicator,
        micro_batches: int,
        schedule: Schedule,
        loss,
        reduction: Reduction,
        timeout: float,
    ):
        communicator = checked_communicator(communicator)
        error = None
        try:
            check_seconds("timeout", timeout)
        except (TypeError, ValueError) as caught:  # the other stages wait in `agree`
            error, timeout = caught, TIMEOUT
        named = isinstance(boundary, Mapping)
        self._boundary = {str(name): one for name, one in boundary.items()} if named else boundary
        self.boundaries = boundaries
        self._channel = Channel(communicator, timeout)
        self.stage, self.index, self.stages = stage, self._channel.stage, self._channel.stages
        self._step = self._trained = 0  # numbers of batches, and of those to train with
        self._traffic = PipelineTraffic()
        self._unfinished: deque[Batch] = deque()  # whose LOSS has not come yet
        try:
            if error is not None:
                raise error
            micro_batches = checked_integer("micro_batches", micro_batches, 1, MOST_MICRO_BATCHES)
            check_choice("schedule", schedule, tuple(SCHEDULES))
            check_reduction(reduction, loss if self.is_last else None)
            if self.is_last and not callable(loss):
                raise TypeError(f"loss must be a function of outputs and targets on the last stage, got {loss!r}")
            self._check()
            self._make_boundaries()
        except Exception as caught:  # whatever it is: the other stages wait in `agree`
            error = caught
        settings = {"hvd_sparse": __version__, "micro_batches": micro_batches, "schedule": schedule}
        self._channel.agree(error, settings)
        self._micro_batches, self._schedule, self._loss, self._reduction = micro_batches, schedule, loss, reduction

    def __repr__(self) -> str:
        own = f"stage {self.index} of {self.stages}, {self._micro_batches} micro-batches, {self._schedule}"
        return f"<{type(self).__name__}, {own}, step {self._trained}>"

    @property
    def is_first(self) -> bool:
        """Whether this stage takes the inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.index == self.stages - 1

    def step(self, inputs=None, targets=None) -> float:
        """Run a batch forward and backward; call it on every stage. Gradients add to existing ones.

        Args:
            inputs: On the first stage: a tensor, or a tuple or dict of them, whose first dimension counts samples.
            targets: Likewise, on the last stage; or on the first, which sends them. The last stage ignores its own if
                the first has some, other stages ignore theirs.

        Returns:
            The loss of the batch, on every stage.

        Raises:
            PipelineError: Another stage has failed.
            ValueError: `inputs` are missing on the first stage, `targets` on both; their sizes are wrong; or stages
                call `step`, `evaluate` and `predict` in different orders.
            TypeError: Inputs, targets, outputs or the loss are of a wrong type.
            TimeoutError: A stage did not answer within `timeout` seconds.
            RuntimeError: This pipeline has failed before, or was closed.
        """
        return self._guarded(self._run, inputs, targets, self._next_batch(training=True))[0]

    def evaluate(self, inputs=None, targets=None) -> float:
        """Return the thresholded network's loss for a batch, on every stage, without gradients.

        Args:
            inputs: As for `step`.
            targets: As for `step`.

        Returns:
            The loss of the batch.

        Raises:
            PipelineError: As `step`; likewise the other exceptions.
        """
        return self._guarded(self._run, inputs, targets, self._next_batch(training=False))[0]

    def predict(self, inputs=None):
        """Run the thresholded network for a batch; call it on every stage.

        Other stages than the last run ahead of it by at most one batch.

        Args:
            inputs: As for `step`.

        Returns:
            The last stage's outputs, on the last stage; None elsewhere. Those of several micro-batches are joined along
            the first dimension.

        Raises:
            ValueError: There are several micro-batches, and an output's first dimension does not count samples.
            PipelineError: As `step`; likewise the other exceptions.
        """
        _, batch = self._guarded(self._run, inputs, None, self._next_batch(training=False, has_loss=False))
        if not self.is_last:
            return None
        parts = zip(*batch.outputs, strict=True)
        leaves = [self._concatenate(list(part)) if len(part) > 1 else part[0] for part in parts]
        return tree.unflatten(leaves, batch.output_structure)

    def stats(self) -> PipelineStats:
        """Return this stage's traffic since it was built.

        Returns:
            "steps", "step" and "total" as of a compressor: activations and gradients, of training; seconds is empty.
            "forward", "backward", "evaluation": messages, dense_bytes (of the dense tensors), payload_bytes (messages
            with their headers; also as sent_bytes), ratio and density. "targets_bytes"; "occupancy": part of the masked
            elements that was kept in training, over all steps; "boundaries": {name: the `stats` of this stage's
            boundary}, whose occupancies count evaluation, too.
        """
        boundaries = {name: one.stats() for name, one in self.boundaries.items()}
        return {**self._traffic.stats(self._trained), "boundaries": boundaries}

    def close(self) -> None:
        """Close this stage, and tell the others; the interpreter's exit does it otherwise."""
        self._channel.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if error is not None and not is_end(error):
                self._blame(error)
        finally:
            self.close()

    @abc.abstractmethod
    def _check(self) -> None:
        """Raise ValueError or TypeError for wrong arguments of the framework's own."""

    @abc.abstractmethod
    def _check_samples(self, name: str, leaf) -> None:
        """Raise TypeError or ValueError unless a leaf of inputs or targets is a tensor with samples."""

    @abc.abstractmethod
    def _split(self, leaf, sizes: list[int]) -> list:
        """Return parts of a tensor along its first dimension."""

    @abc.abstractmethod
    def _concatenate(self, parts: list):
        """Return parts of a tensor as one."""

    @abc.abstractmethod
    def _from_wire(self, tensor: Tensor):
        """Return a message's tensor as the framework's."""

    @abc.abstractmethod
    def _to_wire(self, name: str, leaf, training: bool) -> Tensor:
        """Return a tensor as a message's, masked where there is a boundary for outputs of this name."""

    @abc.abstractmethod
    def _forward(self, micro_batch: MicroBatch, targets, weight: float, training: bool):
        """Compute the outputs, as a tree, and with targets the weighted loss. Store what backward needs."""

    @abc.abstractmethod
    def _backward(self, micro_batch: MicroBatch, gradients: list[Tensor] | None) -> list[np.ndarray]:
        """Add up the parameters' gradients; return those of the inputs that want one.

        gradients: of the outputs that want one; None on the last stage, which begins at its loss.
        """

    def _next_batch(self, training: bool, has_loss: bool = True) -> Batch:
        """Return the state of a new batch; RuntimeError after `close`."""
        if not self._channel.is_open and not self._channel.failure:
            raise RuntimeError("this pipeline was closed, and cannot go on: build another one")
        return Batch(self._step + 1, training, has_loss)

    def _guarded(self, function, *arguments):
        """Call; whatever fails here is told to all ranks."""
        if self._channel.failure:
            raise RuntimeError(f"this pipeline has failed before, and cannot go on: {self._channel.failure}")
        try:
            self._channel.check()
            return function(*arguments)
        except BaseException as error:
            self._blame(error)
            raise

    def _blame(self, error: BaseException) -> None:
        """Tell all ranks why this one fails; PipelineError if that follows from another one's failure."""
        cause = self._channel.fail(error)
        if cause is not None and isinstance(error, Exception) and not isinstance(error, PipelineError):
            raise cause from error

    def _run(self, inputs, targets, batch: Batch) -> tuple[float, Batch]:
        self._step, self._trained = batch.step, self._trained + batch.training
        if batch.training:
            self._traffic.begin_step()
        if self.is_first:
            self._begin(inputs, targets, batch)
        batch.in_flight[0] = self._take(0, batch)  # says how many micro-batches there are
        head = batch.in_flight[0].head
        if self.is_last and targets is not None and not head.flags & TARGETS_FOLLOW:
            batch.targets = self._parts(targets, split_rows(head.total_rows, head.micros))
        for what, micro in SCHEDULES[self._schedule](self.index, self.stages, head.micros):
            if what == FORWARD:
                self._run_forward(micro, batch)
            elif batch.training:
                self._run_backward(micro, batch)
            self._channel.progress()
        loss = self._share_loss(batch)
        if batch.training:
            self._channel.meet(f"the end of step {batch.step}")
            self._report(lambda: self._traffic.stats(self._trained), self._trained)
        return loss, batch

    def _begin(self, inputs, targets, batch: Batch) -> None:
        """Cut the inputs into micro-batches, and send the targets on their way."""
        leaves, batch.structure = tree.flatten(inputs)
        for leaf in leaves:
            self._check_samples("inputs", leaf)
        total = checked_rows(leaves)
        sizes = split_rows(total, self._micro_batches)
        follows = targets is not None and not self.is_last
        place = {"micros": len(sizes), "total_rows": total, "flags": batch.flags | (TARGETS_FOLLOW if follows else 0)}
        batch.heads = [Head(Kind.FORWARD, batch.step, m, rows=size, **place) for m, size in enumerate(sizes)]
        batch.inputs = list(zip(*[self._split(leaf, sizes) for leaf in leaves], strict=True))
        if follows:
            for head, part in zip(batch.heads, self._parts(targets, sizes), strict=True):
                parts, structure = tree.flatten(part)
                tensors = [self._to_wire("", leaf, batch.training) for leaf in parts]
                data = message.encode(head._replace(kind=Kind.TARGETS), structure, tensors)
                self._traffic.add_targets(data)
                self._channel.send(self.stages - 1, Kind.TARGETS, data)

    def _parts(self, targets, sizes: list[int]) -> list:
        """Return the parts of a tree along the first dimension, one for each micro-batch."""
        leaves, structure = tree.flatten(targets)
        for leaf in leaves:
            self._check_samples("targets", leaf)
        check_targets(leaves, sum(sizes))
        parts = zip(*[self._split(leaf, sizes) for leaf in leaves], strict=True)
        return [tree.unflatten(list(part), structure) for part in parts]

    def _take(self, micro: int, batch: Batch) -> MicroBatch:
        """Return a micro-batch's inputs: this stage's own, or those that the stage before sends."""
        if self.is_first:
            return MicroBatch(batch.heads[micro], list(batch.inputs[micro]), batch.structure, [])
        head, structure, tensors = self._receive(self.index - 1, Kind.FORWARD, micro, batch)
        return MicroBatch(head, [self._from_wire(tensor) for tensor in tensors], structure, tensors)

    def _receive(self, stage: int, kind: Kind, micro: int, batch: Batch):
        """Return head, structure, and tensors or LOSS's number; ValueError: of another step, call or micro-batch."""
        wanted = Head(kind, batch.step, micro, flags=batch.flags)
        data = self._channel.receive(stage, kind, str(wanted))
        if batch.training and kind in (Kind.FORWARD, Kind.BACKWARD):
            self._traffic.add_received(data)
        head, description, body = message.decode_head(data)
        if (head.step, head.micro, head.flags & CALL) != (wanted.step, micro, wanted.flags):
            raise ValueError(
                f"stage {self.index} expects {wanted} from stage {stage}, got {head}: every stage must call step, "
                "evaluate and predict in the same order"
            )
        if kind == Kind.BACKWARD:
            likes = [tensor for tensor in batch.in_flight[micro].passed_on if tensor.gradient]
            return head, None, message.decode_gradients(body, likes)
        if kind == Kind.LOSS:
            return head, None, message.decode_loss(description, body)
        return head, *message.decode_tensors(description, body)

    def _run_forward(self, micro: int, batch: Batch) -> None:
        micro_batch = batch.in_flight.pop(micro, None) or self._take(micro, batch)
        weight = micro_batch.head.rows / micro_batch.head.total_rows if self._reduction == "mean" else 1.0
        targets = self._targets(micro, micro_batch, batch) if self.is_last and batch.has_loss else None
        micro_batch.outputs, structure = tree.flatten(self._forward(micro_batch, targets, weight, batch.training))
        if not self.is_last:
            self._pass_on(micro_batch, structure, batch)
        elif not batch.has_loss:
            batch.add_outputs(micro_batch, structure)
        else:
            batch.losses.append(micro_batch.loss)
        if batch.training:
            batch.in_flight[micro] = micro_batch

    def _targets(self, micro: int, micro_batch: MicroBatch, batch: Batch):
        """Return the targets of a micro-batch."""
        if micro_batch.head.flags & TARGETS_FOLLOW:
            _, structure, tensors = self._receive(0, Kind.TARGETS, micro, batch)
            return tree.unflatten([self._from_wire(tensor) for tensor in tensors], structure)
        if batch.targets is None:
            raise ValueError("targets must be given on the first stage, or on the last one; got none")
        return batch.targets[micro]

    def _pass_on(self, micro_batch: MicroBatch, structure, batch: Batch) -> None:
        """Send outputs to the next stage."""
        names = tree.names(structure)
        if isinstance(self._boundary, Mapping) and not set(self._boundary) <= set(names):
            raise ValueError(f"boundary must name outputs of this stage, {names}; got {list(self._boundary)}")
        named = zip(names, micro_batch.outputs, strict=True)
        micro_batch.passed_on = sent = [self._to_wire(name, leaf, batch.training) for name, leaf in named]
        data = message.encode(micro_batch.head._replace(kind=Kind.FORWARD), structure, sent)
        self._channel.send(self.index + 1, Kind.FORWARD, data)
        self._traffic.add("forward" if batch.training else "evaluation", sent, data)

    def _run_backward(self, micro: int, batch: Batch) -> None:
        micro_batch = batch.in_flight[micro]
        gradients = None
        if not self.is_last:
            _, _, gradients = self._receive(self.index + 1, Kind.BACKWARD, micro, batch)
        arrays = self._backward(micro_batch, gradients)
        del batch.in_flight[micro]
        if self.is_first:
            return
        likes = [tensor for tensor in micro_batch.received if tensor.gradient]
        back = [like._replace(array=array) for like, array in zip(likes, arrays, strict=True)]
        data = message.encode(micro_batch.head._replace(kind=Kind.BACKWARD), tensors=back, describe=False)
        self._channel.send(self.index - 1, Kind.BACKWARD, data)
        self._traffic.add("backward", back, data)

    def _share_loss(self, batch: Batch) -> float:
        """Return the batch's loss on all stages.

        A prediction has none, and waits until the one before has ended: else stages that run ahead would hold the
        messages of any number of batches.
        """
        if self.is_last:
            loss = float(sum(float(part) for part in batch.losses))
            head = Head(Kind.LOSS, batch.step, flags=batch.flags)
            data = message.encode(head, 0, [Tensor(np.array(loss), "float64")])
            for stage in range(self.stages - 1):
                self._channel.send(stage, Kind.LOSS, data)
            return loss
        self._unfinished.append(Batch(batch.step, batch.training, batch.has_loss))
        loss = 0.0
        while len(self._unfinished) > (0 if batch.has_loss else 1):
            _, _, loss = self._receive(self.stages - 1, Kind.LOSS, 0, self._unfinished.popleft())
        return loss
