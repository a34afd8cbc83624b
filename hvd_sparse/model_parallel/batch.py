"""What a stage knows of the batch that passes through it."""

from hvd_sparse.model_parallel import tree
from hvd_sparse.model_parallel.message import EVALUATING, PREDICTING, Head, Tensor


class MicroBatch:
    """A micro-batch on its way through a stage. inputs, outputs: the framework's tensors, without their structure."""

    def __init__(self, head: Head, inputs: list, structure, received: list[Tensor]):
        self.head, self.inputs, self.structure = head, inputs, structure
        self.received = received  # as the stage before sent them; none on the first stage
        self.outputs: list = []
        self.passed_on: list[Tensor] = []  # as they went to the next stage
        self.loss = None
        self.added = None  # the sum of the losses that layers of this stage add, such as of a regularizer
        self.weighted_loss = None  # where PyTorch's backward begins, on the last stage
        self.tape = None  # TensorFlow's

    def wanted(self) -> list:
        """Return the inputs whose gradients the stage before wants; none on the first stage."""
        return [leaf for leaf, sent in zip(self.inputs, self.received, strict=False) if sent.gradient]


class Batch:
    """A stage's state of the current batch."""

    def __init__(self, step: int, training: bool, has_loss: bool):
        self.step, self.training, self.has_loss = step, training, has_loss
        self.inputs: list = []  # of each micro-batch, on the first stage
        self.structure = None
        self.heads: list[Head] = []
        self.targets = None
        self.in_flight: dict[int, MicroBatch] = {}
        self.losses: list = []
        self.outputs: list[list] = []
        self.output_structure = None

    @property
    def flags(self) -> int:
        """The flags of this batch's messages."""
        return (0 if self.training else EVALUATING) | (0 if self.has_loss else PREDICTING)

    def add_outputs(self, micro_batch: MicroBatch, structure) -> None:
        """Keep a micro-batch's outputs; ValueError if those of several cannot be joined along the first dimension."""
        rows = micro_batch.head.rows
        for name, leaf in zip(tree.names(structure), micro_batch.outputs, strict=True):
            shape = tuple(getattr(leaf, "shape", ()))
            if micro_batch.head.micros > 1 and shape[:1] != (rows,):
                raise ValueError(
                    "predict joins the outputs of micro-batches along the first dimension, which must count samples: "
                    f"output {name!r} has shape {list(shape)} for {rows} samples. Build another pipeline with "
                    "micro_batches=1, or let the stage leave this output out"
                )
        self.outputs.append(micro_batch.outputs)
        self.output_structure = structure
