"""Which parameter does a gradient belong to? Horovod hands the gradient over without its name."""

import sys
from collections.abc import Container, Iterable

import torch

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Parameters:
    """The named parameters of one compressor.

    named_parameters: (name, Parameter) pairs. A tied weight that stands under several names keeps its first one; a
    frozen one of a type that cannot train is left out.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]):
        self._by_name: dict[str, torch.nn.Parameter] = {}
        seen: set[int] = set()
        for pair in list(named_parameters):
            name, parameter = _checked_pair(pair)
            if name in self._by_name:
                raise ValueError(f"named_parameters must have unique names, got {name!r} twice")
            if id(parameter) not in seen and can_train(parameter):
                seen.add(id(parameter))
                self._by_name[name] = parameter
        if not self._by_name:
            raise ValueError(
                "named_parameters is empty, or none of them can train; pass model.named_parameters() (an iterator "
                "serves only once)"
            )
        self.device = _device_of(self._by_name)
        self._names = list(self._by_name)
        self._follows: dict[str | None, str] = {}
        self._last: str | None = None

    def __getitem__(self, name: str) -> torch.nn.Parameter:
        return self._by_name[name]

    def __iter__(self):
        return iter(self._names)

    def describe(self) -> list[str]:
        """Return one line a parameter, for the configuration check across ranks."""
        return [f"{name}: {tuple(p.shape)} {p.dtype}" for name, p in sorted(self._by_name.items())]

    def restart(self) -> None:
        """Begin a step: hooks tend to come in the same order in every step, and the guess starts from its first."""
        self._last = None

    def find(self, gradient: torch.Tensor, seen: Container[str]) -> str:
        """Return the name of the parameter whose gradient this is, or raise ValueError.

        A gradient is recognised as an object: `parameter.grad is gradient`. With `sparse_as_dense=True` Horovod passes
        a temporary copy instead, known by its shape among the sparse gradients not yet seen; where several have that
        shape, by the parameter that Horovod's calling function holds.
        """
        guess = self._follows.get(self._last)
        if guess is None or self._by_name[guess].grad is not gradient:
            guess = self._follows[self._last] = self._search(gradient, seen)
        self._last = guess
        return guess

    def _search(self, gradient: torch.Tensor, seen: Container[str]) -> str:
        for name, parameter in self._by_name.items():
            if parameter.grad is gradient:
                return name
            if parameter is gradient:
                raise ValueError(
                    "hvd_sparse does not work with op=Adasum: it combines the models' changes, not their gradients. "
                    "Use op=hvd.Average or op=hvd.Sum"
                )
        sparse = [name for name in self._names if name not in seen and _could_be(self._by_name[name].grad, gradient)]
        if len(sparse) > 1:  # Horovod's own frame names the parameter that it is busy with
            sparse = [name for name in sparse if self._by_name[name] is _parameter_of_caller()] or sparse
        if len(sparse) == 1:
            return sparse[0]
        if sparse:
            raise ValueError(
                f"a dense copy of a sparse gradient of shape {tuple(gradient.shape)} could belong to each of "
                f"{', '.join(sparse)}: use sparse_as_dense=False, or embeddings with sparse=False"
            )
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)}, {gradient.dtype}, belongs to none of the {len(self._names)} "
            "parameters that this compression was built with. Build it from the optimizer's own named_parameters: "
            "Compression.dgc(model.named_parameters(), ...)"
        )


def can_train(parameter: torch.Tensor) -> bool:
    """Return whether a parameter may ever have a gradient here: a frozen one of integers never has."""
    return parameter.dtype in DTYPES


def _checked_pair(pair) -> tuple[str, torch.nn.Parameter]:
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
        raise TypeError(
            "named_parameters must be (name, parameter) pairs, as from model.named_parameters(); got "
            f"{type(pair).__name__}"
        )
    name, parameter = pair
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name}: a parameter must be a torch.Tensor, got {type(parameter).__name__}")
    if parameter.dtype not in DTYPES and parameter.requires_grad:
        raise TypeError(f"{name}: gradients must be float32, float64, float16 or bfloat16, got {parameter.dtype}")
    if parameter.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: parameters must be on the CPU or on CUDA devices, got {parameter.device}")
    return name, parameter


def _device_of(parameters: dict[str, torch.nn.Parameter]) -> torch.device:
    """Return the device that all parameters share."""
    first = next(iter(parameters))
    for name, parameter in parameters.items():
        if parameter.device != parameters[first].device:
            raise ValueError(
                f"all parameters of an optimizer must be on one device: {first} is on {parameters[first].device}, "
                f"{name} on {parameter.device}. Build an optimizer and a compressor for each device"
            )
    return parameters[first].device


def _could_be(grad: torch.Tensor | None, gradient: torch.Tensor) -> bool:
    return grad is not None and grad.is_sparse and grad.shape == gradient.shape


def _parameter_of_caller(depth: int = 8):
    """Return the `p` of Horovod's `_allreduce_grad_async`, None if something else called."""
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            return None
        if frame.f_code.co_name == "_allreduce_grad_async":
            return frame.f_locals.get("p")
        frame = frame.f_back
    return None
