"""Compressors for PyTorch's DistributedDataParallel (DDP). They do not need Horovod.

    compression = Compression.dgc(model.named_parameters(), density=0.001, momentum=0.9)
    model = DistributedDataParallel(model)
    compression.register(model)

DDP calls the communication hook once for each complete bucket, in the same order on every rank. The hook compresses the
bucket's gradients and starts to send messages during the backward pass. The last bucket finishes the step.
"""

import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hvd_sparse.algorithms import Algorithm, CompressionMethods
from hvd_sparse.checks import some
from hvd_sparse.torch import dense_hook
from hvd_sparse.torch.exchange import Pending
from hvd_sparse.torch.group_compressor import SPARSE, GroupCompressor
from hvd_sparse.torch.parameters import NamedParameters

FROZEN_THEN = (
    "hvd_sparse: DistributedDataParallel trains a parameter that its compressor was not built with, as it was frozen "
    "then: build the compressor from all of the model's named_parameters()"
)


class DDPCompressor(GroupCompressor):
    """A compressor with error feedback for one DistributedDataParallel. The methods of `Compression` make it.

    If any rank has a gradient that is not finite, the step is skipped on all ranks: every gradient becomes NaN, so that
    a loss scaler skips its update. The residual adds zero for the elements that are not finite.

    If a rank does not use a parameter in a step (`find_unused_parameters=True` or `static_graph=True`), the rank sends
    nothing for this parameter, and the parameter's residual and velocity do not change.

    Args:
        algorithm: The settings of a method, from `hvd_sparse.algorithms`.
        parameters: The model, or its (name, parameter) pairs.
        process_group: The model's `torch.distributed.ProcessGroup`; None: all ranks.

    Raises:
        ValueError: An argument is wrong. In the first step: settings differ between ranks; every rank raises. In any
            step: a payload is damaged.
        TypeError: An argument has the wrong type.
        RuntimeError: In a step: ranks are at different steps. On a CUDA device: a payload of the previous step was
            damaged.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        parameters: NamedParameters,
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(algorithm, parameters, process_group)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._model: weakref.ref[DistributedDataParallel] | None = None  # it keeps the hook, and so this compressor
        self._trained = 0  # number of parameters that the model trains
        self._reduced: set[str] = set()  # parameters that the model reduces: those of its last step
        self._optimizer_checks.further = weakref.WeakMethod(self._refuse_unreduced)

    def register(self, model: DistributedDataParallel) -> None:
        """Compress the model's gradients from now on. Call it once on every rank, before the first backward pass.

        Args:
            model: A DistributedDataParallel with the parameters of this compressor.

        Raises:
            TypeError: The model is not a DistributedDataParallel.
            ValueError: The model has other parameters, another process group, another communication hook, or an option
                that does not support hooks. Or this compressor is already registered.
        """
        dense_hook.check_model(model, "compression")
        if self._is_registered():
            raise ValueError(
                "this compressor is registered already: build a new one for each model, "
                f"Compression.{self.algorithm.name}(model.named_parameters(), ...)"
            )
        self._refuse_own_loop()
        _check_options(model)
        self._check_group(model)
        self._check_parameters(model)
        self._note_used()
        model.register_comm_hook(None, self._reduce)
        self._model = weakref.ref(model)

    def compress(self, tensor: object) -> None:
        """Raise TypeError: this is the compressor for DistributedDataParallel, where Horovod needs its own."""
        raise TypeError(
            "this Compression is for DistributedDataParallel: compression.register(model). For "
            "hvd.DistributedOptimizer: from hvd_sparse.torch import Compression"
        )

    def _check_group(self, model: DistributedDataParallel) -> None:
        group = self._collectives.group
        if model.process_group is not group:
            raise ValueError(
                f"the model exchanges over a process group of {model.process_group.size()} ranks, its compressor over "
                f"another one of {group.size()}: give both the same, process_group=group and process_set=group"
            )

    def _check_parameters(self, model: DistributedDataParallel) -> None:
        """Raise ValueError unless the model trains the parameters of this compressor, and no others."""
        theirs = {
            id(parameter): name
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        }
        unknown = [name for identity, name in theirs.items() if identity not in self._names]
        if unknown:
            raise ValueError(
                f"the model trains parameters that this compressor was not built with: {some(unknown)}. Build it "
                "from the model's own named_parameters(): those in its argument dense are not compressed"
            )
        self._trained = model._get_ddp_logging_data()["num_parameter_tensors"]  # when it was built
        own = {identity: name for identity, name in self._names.items() if self._parameters[name].requires_grad}
        foreign = [name for identity, name in own.items() if identity not in theirs]
        if foreign:
            raise ValueError(
                f"this compressor was built with parameters that the model does not train: {some(foreign)}. Build "
                "it from the model's own named_parameters()"
            )

    def _note_used(self) -> None:
        """Note from now on which parameters receive a gradient.

        A gradient does not tell it: for a parameter that was not used, DDP passes what its `grad` still has, and the
        gradient of one that was used may be zero.
        """
        handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, handles)  # the parameters may live on, under another DDP
        for name, parameter in self._parameters.items():
            if parameter.is_inference():  # made in torch.inference_mode(): frozen for good
                continue
            was_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # PyTorch takes no hook of a frozen one, which may train later
            handles.append(parameter.register_post_accumulate_grad_hook(partial(_note, self._used, name)))
            parameter.requires_grad_(was_trained)

    @torch.no_grad()
    @torch.compiler.disable  # a compiled step calls it
    def _reduce(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Compress the gradients of a bucket; finish the step after the last bucket. This is the communication hook."""
        with self._lock:
            if any(id(parameter) not in self._names for parameter in bucket.parameters()):
                raise ValueError(FROZEN_THEN)
            names = [self._names[id(parameter)] for parameter in bucket.parameters()]
            with self._traffic.timed("compress"):
                if self._is_first(bucket, names):
                    self._open_step()
                elif not self._under_way:
                    raise RuntimeError(
                        "hvd_sparse: reset() or load_state_dict() was called during a backward pass; call these "
                        "between optimizer steps"
                    )
                future = self._take_bucket(bucket, names)
            if bucket.is_last() or (self._is_static() and len(self._arrived_names) == self._trained):
                self._deliver()
            return future

    def _is_registered(self) -> bool:
        """Return whether `register` was called."""
        return self._model is not None

    def _is_first(self, bucket: dist.GradBucket, names: list[str]) -> bool:
        """Return whether a bucket is the first one of a step.

        In the first step of a static graph, DDP calls the hook after the backward pass, with index 0 for every bucket.
        """
        if bucket.index() > 0 or not self._arrived_names:
            return bucket.index() == 0
        return not self._is_static() or not self._arrived_names.isdisjoint(names)

    def _is_set(self, option: str) -> bool:
        """Return whether an option of the model is set."""
        model = None if self._model is None else self._model()
        return model is not None and bool(getattr(model, option))

    def _is_static(self) -> bool:
        """Return whether the model has a static graph, which a user may also set after `register`."""
        return self._is_set("static_graph")

    def _leaves_out(self) -> bool:
        """Return whether a step may leave out parameters."""
        return self._is_static() or self._is_set("find_unused_parameters")

    def _open_step(self) -> None:
        """Begin a step."""
        self._collectives.leaves_out = self._leaves_out()
        super()._open_step()

    def _take_bucket(self, bucket: dist.GradBucket, names: list[str]) -> Future[torch.Tensor]:
        """Add a bucket's gradients to the step."""
        if bucket.buffer().is_sparse:
            raise ValueError(SPARSE)
        gradients = list(map(_in_order, bucket.gradients(), bucket.parameters()))
        # If no rank used a parameter, DDP ignores the hook's result for it, so a residual sent then would be lost.
        unused = {name for name in names if name not in self._used} if self._leaves_out() else ()
        return self._take(bucket.buffer(), names, gradients, unused)

    def _deliver(self) -> None:
        """Finish the step: write the mean over all ranks to the buckets."""
        self._reduced = self._arrived_names
        self._refuse_unreduced()
        super()._deliver()

    def _refuse_unreduced(self) -> None:
        """Raise RuntimeError if a parameter that trains has a gradient that DDP does not reduce."""
        own = self._used - self._reduced if self._reduced else ()
        alone = sorted(name for name in own if self._parameters[name].requires_grad)
        if alone:
            raise RuntimeError(
                f"hvd_sparse: DistributedDataParallel does not reduce the gradient of {alone[0]}, and each rank would "
                "train it alone: it was unfrozen after DistributedDataParallel was built. When other layers are to "
                "train, delete that and its compressor, build both anew, and load the compressor's state"
            )

    def _start_unused(self) -> Pending | None:
        """Start to count the ranks that use each parameter, where the bucket of an unused one is its `grad`."""
        if not (self._leaves_out() and self._is_set("gradient_as_bucket_view")):
            return None  # DDP itself leaves such a `grad` as it is
        used = torch.tensor([float(name in self._used) for name in sorted(self._arrived_names)], device="cpu")
        return self._exchange.allreduce("used", used)

    def _description(self) -> list[str]:
        views = f"gradient_as_bucket_view = {self._is_set('gradient_as_bucket_view')}"
        return [*super()._description(), f"parameters may be left out = {self._leaves_out()}", views]


class Compression(CompressionMethods[NamedParameters, DDPCompressor]):
    """Makes compressors for DistributedDataParallel: `Compression.dgc(model.named_parameters(), ...)`.

    Methods and arguments are the same as in `hvd_sparse.torch.Compression`, but `process_set` takes the model's process
    group. Build one compressor for each model, in the same order on every rank, and call its `register` method. As with
    Horovod, `none` and `fp16` are used without a call: `Compression.fp16.register(model)`.
    """

    none, fp16 = dense_hook.none, dense_hook.fp16

    @classmethod
    def _build(cls, algorithm: Algorithm, parameters, process_set) -> DDPCompressor:
        return DDPCompressor(algorithm, parameters, process_set)


def _check_options(model: DistributedDataParallel) -> None:
    """Raise ValueError if an option of the model keeps gradients from the communication hook."""
    options = {
        "mixed_precision": "use torch.autocast, see docs/mixed-precision.md",
        "skip_all_reduce_unused_params": "leave it out: a parameter that no rank uses costs next to nothing",
        "_use_python_reducer": 'set torch._dynamo.config.optimize_ddp = "ddp_optimizer"',
    }
    for option, remedy in options.items():
        if getattr(model, option, None):
            raise ValueError(f"hvd_sparse does not work with {option.lstrip('_')} of DistributedDataParallel: {remedy}")
    dense_hook.check_no_hook(model)


def _note(used: set[str], name: str, parameter: torch.Tensor) -> None:
    used.add(name)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _in_order(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient of a bucket with its elements in their places.

    DDP stores it in the parameter's order in memory, such as channels_last, and passes a view of contiguous elements.
    """
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.is_contiguous() or not parameter.permute(order).is_contiguous():
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
