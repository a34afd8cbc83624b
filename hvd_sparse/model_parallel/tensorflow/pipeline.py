"""Pipelines of stages for TensorFlow: one stage per rank, sparse activations between them (DCT-MP)."""

import inspect
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from hvd_sparse.model_parallel import message, tree
from hvd_sparse.model_parallel import pipeline as shared
from hvd_sparse.model_parallel.arguments import Reduction, check_samples, checked_dtype
from hvd_sparse.model_parallel.batch import Batch, MicroBatch
from hvd_sparse.model_parallel.message import Tensor
from hvd_sparse.model_parallel.schedule import Schedule
from hvd_sparse.model_parallel.tensorflow.boundary import ThresholdBoundary
from hvd_sparse.tensorflow.variables import has_variables, unwrapped

DTYPES = {getattr(tf, name): name for name in message.DTYPES if hasattr(tf, name)}
COMPOSITE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
# AutoGraph would convert the code of a call inside a `tf.function` before that is refused
unconverted = tf.autograph.experimental.do_not_convert
Boundary = ThresholdBoundary | float | None


class Pipeline(shared.Pipeline):
    """This rank's stage of a pipeline, on an mpi4py communicator whose ranks are the stages.

        pipeline = Pipeline(stage, boundary=0.05, micro_batches=4, loss=cross_entropy)
        loss = pipeline.step(inputs, targets)          # on every rank; inputs count on the first
        optimizer.apply_gradients(zip(pipeline.gradients(), stage.trainable_variables))

    Build it on every rank of the communicator. Messages go through the CPU. `boundaries`, {name: layer}, are not part
    of the stage: `tf.train.Checkpoint(stage=stage, boundaries=pipeline.boundaries)`. A stage that fails ends the others
    with a `PipelineError`, also in the constructor. Source: Dynamic Communication Thresholding (Gupta et al., 2021),
    section 2.2; schedules: GPipe (Huang et al., 2019), 1F1B (PipeDream, Narayanan et al., 2019).

    Args:
        stage: A Keras model or layer, or any callable with `trainable_variables`. It runs eagerly; to compile it, make
            its call a `tf.function`, which in Keras must have the argument `training` (an inner layer's should have it,
            too, and is not checked). It gets `training=` if it has this argument or is of Keras, whose inner layers
            then get it, too (Keras 3.0 to 3.9: only if its call has it). A returned tuple becomes the arguments of the
            next stage, a dict its keyword arguments; but a stage with a single argument, such as a functional model of
            several inputs, gets the tuple or dict itself.
            Tensors of integers and bool are sent without a gradient. The losses that its layers add (`stage.losses`, as
            of a regularizer) are trained, too; their mean over micro-batches is not part of the loss that `step`
            returns. In a `tf.function`, only those of weights are.
        boundary: Threshold of a stage's outputs. None: none; a density; a `ThresholdBoundary`; or {name: one of these}
            for several outputs, named by key or number. Tensors of less than two dimensions are sent dense.
        micro_batches: Number of micro-batches per batch; a batch of fewer samples has fewer.
        schedule: "gpipe"; or "1f1b", which holds fewer activations, with bit-identical gradients.
        loss: A function of outputs and targets, in this order, that returns a scalar, on the last stage; or a
            `tf.keras.losses.Loss`, called as Keras does.
        reduction: Reduction of `loss` over samples: "mean" (weights micro-batches by their samples) or "sum". It must
            be that of a Keras loss.
        timeout: Seconds to wait for another stage; by default HVD_SPARSE_TIMEOUT of the environment, or 600.
        communicator: An mpi4py communicator, in a hybrid run that of `hybrid`; None: the world.

    Raises:
        PipelineError: Another stage has failed.
        ValueError: A value is out of range, or another stage has other settings.
        TimeoutError: Another rank does not build its pipeline.
        TypeError: A value has the wrong type.
        RuntimeError: MPI has one rank where Horovod has several, as under `horovodrun --gloo`.
        ImportError: mpi4py is not installed.
    """

    def __init__(
        self,
        stage: Callable,
        *,
        boundary: Boundary | Mapping[str, Boundary] = None,
        micro_batches: int = 1,
        schedule: Schedule = "gpipe",
        loss: Callable | None = None,
        reduction: Reduction = "mean",
        timeout: float = shared.TIMEOUT,
        communicator=None,
    ):
        self._gradients: list[tf.Tensor] | None = None
        boundaries = tf.__internal__.tracking.wrap({})  # a checkpoint restores those that do not exist yet when they do
        super().__init__(stage, boundary, boundaries, communicator, micro_batches, schedule, loss, reduction, timeout)

    @unconverted
    def step(self, inputs=None, targets=None) -> float:
        """Run a batch forward and backward; call it on every stage.

        `gradients` are then those of this batch only: no need to set them to zero.

        Args:
            inputs: On the first stage: a tensor or array, or a tuple or dict of them, whose first dimension counts
                samples.
            targets: Likewise, on the last stage; or on the first, which sends them. The last stage ignores its own if
                the first has some, other stages ignore theirs.

        Returns:
            The loss of the batch, on every stage.

        Raises:
            PipelineError: Another stage has failed.
            ValueError: `inputs` are missing on the first stage, `targets` on both; their sizes are wrong; an output
                that the next stage needs has a Keras mask; or stages call `step`, `evaluate` and `predict` in different
                orders.
            TypeError: Inputs, targets, outputs or the loss are of a wrong type.
            TimeoutError: A stage did not answer within `timeout` seconds.
            RuntimeError: This pipeline has failed before, or was closed; or the call is inside a `tf.function`.
        """
        self._gradients = None
        try:
            return super().step(inputs, targets)
        except BaseException:
            self._gradients = None  # those of the micro-batches that have run
            raise

    evaluate, predict = unconverted(shared.Pipeline.evaluate), unconverted(shared.Pipeline.predict)

    def gradients(self) -> list[tf.Tensor]:
        """Return the gradients of the last step, summed over micro-batches, one per trainable variable.

        Returns:
            Dense tensors in the order of `stage.trainable_variables`, of their shapes and types; zeros for a variable
            without a gradient.

        Raises:
            RuntimeError: There was no step yet, or the last one failed.
        """
        if self._gradients is None:
            raise RuntimeError("gradients() needs a step() that has run to its end, got none")
        return list(self._gradients)

    def reduced_gradients(self, **options) -> list[tf.Tensor]:
        """Return `gradients` after Horovod has reduced them among the replicas of this stage, in hybrid training.

            compression = Compression.dct(stage.trainable_variables, process_set=process_set)
            gradients = pipeline.reduced_gradients(compression=compression, process_set=process_set)

        Call it on all replicas of the stage.

        Args:
            options: Arguments of `hvd.DistributedGradientTape`, which reduces the gradients. The default of
                `process_set` is the one that `hybrid` returned; without `hybrid`, several stages need this argument.

        Returns:
            Tensors as of `gradients`.

        Raises:
            ValueError: `process_set` has other ranks than the replicas of this stage, or is missing.
            RuntimeError: There was no step yet, or the last one failed.
            PipelineError: Another rank has failed. Horovod's own errors are raised too.
        """
        gradients = self.gradients()
        return self._guarded(self._reduced, gradients, options) if gradients else []

    def _next_batch(self, training: bool, has_loss: bool = True) -> Batch:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "step, evaluate and predict need eager execution, got a call inside a tf.function or graph: call step "
                "eagerly; to compile a stage, make its call a tf.function"
            )
        return super()._next_batch(training, has_loss)

    def _reduced(self, gradients: list[tf.Tensor], options: dict) -> list[tf.Tensor]:
        from hvd_sparse.tensorflow import reduce_gradients  # needs Horovod, which a pipeline alone does not

        own = self._channel.process_set
        if options.get("process_set") is None and own is not None:
            options["process_set"] = own
        elif options.get("process_set") is None and self.stages > 1:
            raise ValueError(
                "process_set must have the replicas of this stage, such as the one that hybrid() returns, got none: "
                "Horovod would add the gradients of different stages"
            )
        if own is not None and options["process_set"].process_set_id != own.process_set_id:
            raise ValueError(
                "process_set must be the one that hybrid() returned: with another one, Horovod would add the gradients "
                "of different stages"
            )
        return reduce_gradients(gradients, self.stage.trainable_variables, **options)

    def _check(self) -> None:
        # asked of the type first: a model of Keras 2 that is not built raises
        is_trained = has_variables(self.stage) or hasattr(self.stage, "trainable_variables")
        if not callable(self.stage) or not is_trained:
            raise TypeError(
                "stage must be a model or layer of Keras, or be callable and have trainable_variables, got "
                f"{type(self.stage).__name__}"
            )
        call = getattr(self.stage, "call", self.stage)
        self._signature = inspect.signature(call)
        takes, is_keras = _takes_training(self._signature), _is_keras(self.stage)
        if is_keras and not takes and hasattr(call, "get_concrete_function"):
            raise ValueError(
                "the stage's call is a tf.function without the argument training, whose first call would decide for "
                "all others whether its layers train: give call the argument training"
            )
        self._gets_training = is_keras or takes

    def _made(self, boundary: ThresholdBoundary | float) -> ThresholdBoundary:
        return boundary if isinstance(boundary, ThresholdBoundary) else ThresholdBoundary(boundary)

    def _check_samples(self, name: str, leaf) -> None:
        is_tensor = hasattr(leaf, "shape") and not isinstance(leaf, COMPOSITE)
        check_samples(name, leaf, is_tensor, "dense tensors or arrays")

    def _split(self, leaf, sizes: list[int]) -> list[tf.Tensor]:
        return tf.split(tf.convert_to_tensor(leaf), sizes)

    def _concatenate(self, parts: list[tf.Tensor]) -> tf.Tensor:
        return tf.concat(parts, 0)

    def _from_wire(self, tensor: Tensor) -> tf.Tensor:
        array = tensor.array.view(tf.bfloat16.as_numpy_dtype) if tensor.dtype == "bfloat16" else tensor.array
        return tf.constant(array)

    def _to_wire(self, name: str, leaf: tf.Tensor, training: bool) -> Tensor:
        if not isinstance(leaf, tf.Tensor):
            raise TypeError(f"a stage must return tensors, got {type(leaf).__name__}")
        if name and getattr(leaf, "_keras_mask", None) is not None:
            raise ValueError(
                f"output {name!r} of a stage has a Keras mask, which is not sent, so that the next stage would compute "
                "without it: let the stage return the tuple (tf.identity(output), mask); the next stage's call gets "
                "the second as its argument `mask`"
            )
        dtype = checked_dtype(name, leaf.dtype, DTYPES)
        mask, boundary = None, None
        if leaf.dtype.is_floating and leaf.shape.rank > 1 and tf.size(leaf) > 0:
            boundary = self._boundary_of(name)
        if boundary is not None and boundary.settings.density < 1.0:
            mask = boundary.mask(leaf, training).numpy()
        elif boundary is not None:
            boundary.call(leaf)  # counts; all elements are sent
        return Tensor(_as_array(leaf), dtype, mask, bool(name) and training and dtype in message.DIFFERENTIABLE)

    def _forward(self, micro_batch: MicroBatch, targets, weight: float, training: bool):
        if not training:
            outputs = self._call(tree.unflatten(micro_batch.inputs, micro_batch.structure), False)
            micro_batch.loss = None if targets is None else self._checked_loss(outputs, targets) * weight
            return outputs
        with tf.GradientTape() as tape:
            tape.watch(micro_batch.wanted())
            outputs = self._call(tree.unflatten(micro_batch.inputs, micro_batch.structure), True)
            if targets is not None:
                micro_batch.loss = self._checked_loss(outputs, targets) * weight
            added = [loss for loss in getattr(self.stage, "losses", ()) if tf.is_tensor(loss)]
            if any(map(tf.is_symbolic_tensor, added)):
                raise ValueError(
                    "a layer adds a loss inside a tf.function, as an activity regularizer does, and it cannot be "
                    "trained: leave the stage's call uncompiled, or regularize weights"
                )
            if added:  # once for the whole batch
                share = micro_batch.head.rows / micro_batch.head.total_rows
                micro_batch.added = share * tf.add_n([tf.cast(loss, tf.float32) for loss in added])
        micro_batch.tape = tape
        return outputs

    def _backward(self, micro_batch: MicroBatch, gradients: list[Tensor] | None) -> list[np.ndarray]:
        tape, loss, added = micro_batch.tape, micro_batch.loss, micro_batch.added
        roots, seeds = [loss], None
        if gradients is not None:
            sent = zip(micro_batch.outputs, micro_batch.passed_on, strict=True)
            roots = [leaf for leaf, tensor in sent if tensor.gradient]
            seeds = [self._from_wire(gradient) for gradient in gradients]
        if added is not None:
            roots, seeds = [*roots, added], [*(seeds or [tf.ones_like(loss)]), tf.ones_like(added)]
        variables = [unwrapped(variable) for variable in self.stage.trainable_variables]
        found = tape.gradient(roots, [*variables, *micro_batch.wanted()], seeds, tf.UnconnectedGradients.ZERO)
        dense = [tf.convert_to_tensor(gradient) for gradient in found]
        own, inputs = dense[: len(variables)], dense[len(variables) :]
        before = self._gradients
        self._gradients = own if before is None else [a + b for a, b in zip(before, own, strict=True)]
        return [_as_array(gradient) for gradient in inputs]

    def _call(self, given, training: bool):
        """Call the stage, in the way that it takes what it is given."""
        options = {"training": training} if self._gets_training else {}
        if isinstance(given, (tuple, dict)) and _takes_one(self._signature, given):
            return self.stage(given, **options)
        return tree.call(self.stage, given, **options)

    def _checked_loss(self, outputs, targets) -> tf.Tensor:
        """Return the loss; TypeError or ValueError if it is no scalar tensor."""
        is_keras = isinstance(self._loss, tf.keras.losses.Loss)
        loss = self._loss(targets, outputs) if is_keras else self._loss(outputs, targets)
        if not tf.is_tensor(loss):
            raise TypeError(f"loss must return a tensor of TensorFlow, got {type(loss).__name__}")
        if loss.shape.rank != 0:
            raise ValueError(f"loss must return a scalar, got shape {loss.shape}: reduce it over samples")
        return loss


def _is_keras(stage) -> bool:
    """Return whether a stage is of Keras, which permits `training=` whatever arguments `call` has.

    Inner layers then get it even if `call` does not, but in Keras 3.0 to 3.9.
    """
    return any(base.__module__.partition(".")[0] in ("keras", "tf_keras") for base in type(stage).__mro__)


def _takes_training(signature: inspect.Signature) -> bool:
    parameters = signature.parameters.values()
    return any(p.name == "training" or p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)


def _takes_one(signature: inspect.Signature, given: tuple | dict) -> bool:
    """Return whether a stage has a single argument, which a tuple of several or a dict is then.

    `mask`, which Keras' models and layers have beside their inputs, counts as one where a mask is given: under this
    name, or as the last of a tuple, with elements of bool.
    """
    has_mask = "mask" in given if isinstance(given, dict) else getattr(given[-1], "dtype", None) == tf.bool
    others = ("training",) if has_mask else ("training", "mask")
    parameters = [p for p in signature.parameters.values() if p.name not in others]
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    named = [p for p in parameters if p.kind != inspect.Parameter.VAR_KEYWORD]
    if len(named) != 1 or named[0].kind in several:
        return False
    return set(given) != {named[0].name} if isinstance(given, dict) else len(given) > 1


def _as_array(tensor: tf.Tensor) -> np.ndarray:
    """Return a tensor's elements on the CPU; bfloat16 as uint16."""
    array = tensor.numpy()
    return array.view(np.uint16) if tensor.dtype == tf.bfloat16 else array
