"""Pipelines of stages for PyTorch: one stage per rank, sparse activations between them (DCT-MP)."""

import weakref
from collections.abc import Callable, Mapping

import numpy as np
import torch

from hvd_sparse.model_parallel import message, tree
from hvd_sparse.model_parallel import pipeline as shared
from hvd_sparse.model_parallel.arguments import Reduction, check_samples, checked_dtype
from hvd_sparse.model_parallel.batch import MicroBatch
from hvd_sparse.model_parallel.message import Tensor
from hvd_sparse.model_parallel.schedule import Schedule
from hvd_sparse.model_parallel.torch.boundary import ThresholdBoundary

DTYPES = {getattr(torch, name): name for name in message.DTYPES if hasattr(torch, name)}
Boundary = ThresholdBoundary | float | None


class Pipeline(shared.Pipeline):
    """This rank's stage of a pipeline, on an mpi4py communicator whose ranks are the stages.

        pipeline = Pipeline(stage, boundary=0.05, micro_batches=4, loss=torch.nn.functional.cross_entropy)
        loss = pipeline.step(inputs, targets)          # on every rank; inputs count on the first
        optimizer.step()

    Build it on every rank of the communicator. CPU or CUDA; messages go through the CPU. `step`, `evaluate` and
    `predict` set `stage.train()` and `stage.eval()`. In an `hvd.DistributedOptimizer` of a stage's parameters, set
    `backward_passes_per_step=` to the number of micro-batches. If a stage fails, all others raise `PipelineError`, also
    in the constructor. Source: Dynamic Communication Thresholding (Gupta et al., 2021), section 2.2; schedules:
    GPipe (Huang et al., 2019), 1F1B (PipeDream, Narayanan et al., 2019).

    Args:
        stage: Any module. A returned tuple becomes the arguments of the next stage, a dict its keyword arguments;
            tensors of integers and bool are sent without a gradient.
        boundary: Threshold of a stage's outputs. None: none; a density; a `ThresholdBoundary`; or {name: one of these}
            for several outputs, named by key or number. Tensors of less than two dimensions are sent dense.
        micro_batches: Number of micro-batches per batch; a batch of fewer samples has fewer.
        schedule: "gpipe"; or "1f1b", which holds fewer activations, with bit-identical gradients.
        loss: A function of outputs and targets that returns a scalar, on the last stage.
        reduction: Reduction of `loss` over samples: "mean" (weights micro-batches by their samples) or "sum". It must
            be that of a loss object, such as `torch.nn.CrossEntropyLoss`.
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
        stage: torch.nn.Module,
        *,
        boundary: Boundary | Mapping[str, Boundary] = None,
        micro_batches: int = 1,
        schedule: Schedule = "gpipe",
        loss: Callable | None = None,
        reduction: Reduction = "mean",
        timeout: float = shared.TIMEOUT,
        communicator=None,
    ):
        boundaries = Boundaries(self)
        super().__init__(stage, boundary, boundaries, communicator, micro_batches, schedule, loss, reduction, timeout)

    def _check(self) -> None:
        if not isinstance(self.stage, torch.nn.Module):
            raise TypeError(f"stage must be a torch.nn.Module, got {type(self.stage).__name__}")
        parameter = next(self.stage.parameters(), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device

    def _made(self, boundary: ThresholdBoundary | float) -> ThresholdBoundary:
        made = boundary if isinstance(boundary, ThresholdBoundary) else ThresholdBoundary(boundary)
        return made.to(self._device)

    def _boundary_of(self, name: str) -> ThresholdBoundary | None:
        with torch.inference_mode(False):  # buffers made in inference mode could not change in training
            return super()._boundary_of(name)

    def _check_samples(self, name: str, leaf) -> None:
        check_samples(name, leaf, isinstance(leaf, torch.Tensor), "tensors of PyTorch")

    def _split(self, leaf: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        return list(torch.split(leaf, sizes))

    def _concatenate(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts)

    def _from_wire(self, tensor: Tensor) -> torch.Tensor:
        received = torch.from_numpy(tensor.array)
        if tensor.dtype == "bfloat16":
            received = received.view(torch.bfloat16)
        return received.to(self._device).requires_grad_(tensor.gradient)

    def _to_wire(self, name: str, leaf: torch.Tensor, training: bool) -> Tensor:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"a stage must return tensors, got {type(leaf).__name__}")
        if leaf.layout != torch.strided:
            raise TypeError(f"output {name!r} of a stage must be a dense tensor, got one of layout {leaf.layout}")
        dtype = checked_dtype(name, leaf.dtype, DTYPES)
        mask, boundary = None, None
        if leaf.is_floating_point() and leaf.dim() > 1 and leaf.numel() > 0:
            boundary = self._boundary_of(name)
        if boundary is not None and boundary.train(training).settings.density < 1.0:
            mask = boundary.mask(leaf).cpu().numpy()
        elif boundary is not None:
            boundary(leaf)  # counts; all elements are sent
        return Tensor(_as_array(leaf), dtype, mask, leaf.requires_grad)

    def _forward(self, micro_batch: MicroBatch, targets, weight: float, training: bool):
        self.stage.train(training)
        with torch.set_grad_enabled(training):
            # no leaves: a stage may begin with an in-place operation, which autograd refuses for them
            given = [leaf.clone() if leaf.requires_grad else leaf for leaf in micro_batch.inputs]
            outputs = tree.call(self.stage, tree.unflatten(given, micro_batch.structure))
            if targets is not None:
                micro_batch.weighted_loss = self._checked_loss(outputs, targets) * weight
                micro_batch.loss = micro_batch.weighted_loss.detach()
        return outputs

    def _checked_loss(self, outputs, targets) -> torch.Tensor:
        """Return the loss; TypeError or ValueError if it is no scalar tensor."""
        loss = self._loss(outputs, targets)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"loss must return a tensor of PyTorch, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(f"loss must return a scalar, got shape {list(loss.shape)}: reduce it over samples")
        return loss

    def _backward(self, micro_batch: MicroBatch, gradients: list[Tensor] | None) -> list[np.ndarray]:
        if gradients is None:
            if not micro_batch.weighted_loss.requires_grad:
                raise RuntimeError(
                    "the loss depends on no parameter that requires gradients: is every stage frozen, or step() called "
                    "within torch.inference_mode()?"
                )
            micro_batch.weighted_loss.backward()
        else:
            roots = [leaf for leaf in micro_batch.outputs if leaf.requires_grad]
            if roots:
                torch.autograd.backward(roots, [self._from_wire(gradient) for gradient in gradients])
        found = [(leaf, leaf.grad) for leaf in micro_batch.wanted()]
        return [_as_array(torch.zeros_like(leaf) if gradient is None else gradient) for leaf, gradient in found]


class Boundaries(torch.nn.ModuleDict):
    """The boundaries of a stage by name of the output.

    Any name is allowed, such as "values", which `ModuleDict` refuses. `load_state_dict` makes a boundary that would
    only be made in the first batch.
    """

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self._pipeline = weakref.ref(pipeline)

    def __setitem__(self, name: str, boundary: ThresholdBoundary) -> None:
        """Add a boundary."""
        self._modules[name] = boundary

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        for key in state_dict:
            if key.startswith(prefix):
                self._pipeline()._boundary_of(key.removeprefix(prefix).partition(".")[0])
        super()._load_from_state_dict(state_dict, prefix, *args)


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's elements on the CPU; bfloat16 as uint16."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
