"""`Compression.none` and `Compression.fp16` for DistributedDataParallel, the counterparts of Horovod's."""

from collections.abc import Callable

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


class DenseHook:
    """Gradients are sent whole, by PyTorch itself: `Compression.fp16.register(model)`.

    Like Horovod's `Compression.none` and `Compression.fp16` it is used without a call. It has no error feedback, no
    state and no statistics.

    Args:
        name: Its name in `Compression`.
        hook: PyTorch's communication hook, whose state is a process group; None: DDP's own all-reduce.
    """

    def __init__(self, name: str, hook: Callable | None):
        self.name, self._hook = name, hook

    def __repr__(self) -> str:
        return f"Compression.{self.name}"

    def register(self, model: DistributedDataParallel) -> None:
        """Send the model's gradients in this way from now on. Call it on every rank, before the first backward pass.

        Args:
            model: A DistributedDataParallel.

        Raises:
            TypeError: The model is not a DistributedDataParallel.
            ValueError: The model has a communication hook already.
        """
        check_model(model, f"Compression.{self.name}")
        check_no_hook(model)
        if self._hook is not None:
            model.register_comm_hook(model.process_group, self._hook)  # None would stand for all ranks


def check_model(model: object, caller: str) -> None:
    """Raise TypeError unless `caller.register(model)` got a DistributedDataParallel."""
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        raise TypeError(
            f"register takes a DistributedDataParallel, got the {type(model).__name__} of torch.compile: register "
            "before torch.compile, or pass model._orig_mod"
        )
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "register takes the model that DistributedDataParallel returned, got "
            f"{type(model).__name__}: model = DistributedDataParallel(model); {caller}.register(model)"
        )


def check_no_hook(model: DistributedDataParallel) -> None:
    """Raise ValueError if the model has a communication hook."""
    if model._comm_hooks:
        raise ValueError("the model has a communication hook already: register a compressor on a new one")


none = DenseHook("none", None)
fp16 = DenseHook("fp16", default_hooks.fp16_compress_hook)
