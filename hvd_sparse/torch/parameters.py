"""Finds the parameter that a gradient belongs to. Horovod passes gradients to a compressor without their names."""

from collections.abc import Container, Iterable, Iterator, Mapping

import torch

from hvd_sparse.frames import frames, local

NamedParameters = torch.nn.Module | Mapping[str, torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Parameters(Mapping[str, torch.nn.Parameter]):
    """The named parameters of one compressor, by name.

    Args:
        parameters: A model, a mapping of names to parameters, or (name, Parameter) pairs. A tied weight with several
            names keeps the first name. A frozen parameter of a dtype that cannot train, such as integers, is left out.

    Raises:
        TypeError: It is none of these, an entry is not a (name, Parameter) pair, or a trainable parameter has an
            unsupported dtype.
        ValueError: A name occurs twice, no parameter can train, or the parameters are on several devices.
    """

    def __init__(self, parameters: NamedParameters):
        self._by_name: dict[str, torch.nn.Parameter] = {}
        seen: set[int] = set()
        for name, parameter in named(parameters).items():
            _check_supported(name, parameter)
            if id(parameter) not in seen and can_train(parameter):
                seen.add(id(parameter))
                self._by_name[name] = parameter
        if not self._by_name:
            raise ValueError(
                "parameters is empty, or none of them can train; pass the model, or model.named_parameters() anew (an "
                "iterator serves only once)"
            )
        self.device = _device_of(self._by_name)
        self._names = {id(parameter): name for name, parameter in self._by_name.items()}
        self._follows: dict[str | None, str] = {}
        self._last: str | None = None

    def __getitem__(self, name: str) -> torch.nn.Parameter:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def describe(self) -> list[str]:
        """Return one line for each parameter, for the configuration check across ranks."""
        return [f"{name}: {tuple(p.shape)} {p.dtype}" for name, p in sorted(self._by_name.items())]

    def check_device(self) -> None:
        """Raise ValueError if the model was moved to another device after the compressor was built."""
        now = _device_of(self._by_name)
        if now != self.device:
            raise ValueError(
                f"hvd_sparse: the parameters were on {self.device} when the compressor was built, and are on {now} "
                "now. Build the compressor after model.to(device)"
            )

    def begin_step(self) -> None:
        """Begin a step. `find` guesses that gradients arrive in the same order as in the previous step."""
        self._last = None

    def find(self, gradient: torch.Tensor, seen: Container[str]) -> str:
        """Return the name of the parameter that a gradient belongs to.

        A gradient is recognised by identity: `parameter.grad is gradient`. With `sparse_as_dense=True`, Horovod passes
        a dense copy of a sparse gradient. The copy is recognised by its shape. If several sparse gradients have this
        shape, the local variable `p` in Horovod's calling function names the parameter.

        Args:
            gradient: A gradient of any shape.
            seen: The names of the parameters whose gradients have already arrived in this step.

        Raises:
            ValueError: No parameter has this gradient, or several could have it.
        """
        guess = self._follows.get(self._last)
        if guess is None or self._by_name[guess].grad is not gradient:
            guess = self._follows[self._last] = self._search(gradient, seen)
        self._last = guess
        return guess

    def _search(self, gradient: torch.Tensor, seen: Container[str]) -> str:
        called_for = self._names.get(id(_parameter_of_caller()))
        if called_for is not None and self._by_name[called_for].grad is gradient:
            return called_for  # to look at all would take seconds with 10,000 parameters
        for name, parameter in self._by_name.items():
            if parameter.grad is gradient:
                return name
            if parameter is gradient:
                raise ValueError(
                    "hvd_sparse does not work with op=Adasum: it combines the models' changes, not their gradients. "
                    "Use op=hvd.Average or op=hvd.Sum"
                )
        sparse = [name for name, own in self.items() if name not in seen and _could_be(own.grad, gradient)]
        if len(sparse) > 1:
            sparse = [name for name in sparse if self._by_name[name] is _parameter_of_caller()] or sparse
        if len(sparse) == 1:
            return sparse[0]
        if sparse:
            raise ValueError(
                f"a dense copy of a sparse gradient of shape {tuple(gradient.shape)} could belong to each of "
                f"{', '.join(sparse)}: use sparse_as_dense=False, or embeddings with sparse=False"
            )
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)}, {gradient.dtype}, belongs to none of the {len(self)} "
            "parameters that this compressor was built with: the model, or a layer, may have been made anew after it. "
            "Build it from the optimizer's own named_parameters: Compression.dgc(model.named_parameters(), ...). Those "
            "in its argument dense are not compressed"
        )


def can_train(parameter: torch.Tensor) -> bool:
    """Return whether the parameter has a dtype that can have a gradient."""
    return parameter.dtype in DTYPES


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the parameter's gradients: another than its own, if the user has set `grad_dtype`.

    None there, for gradients of any dtype, counts as the parameter's own.
    """
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def named(parameters: NamedParameters, argument: str = "parameters") -> dict[str, torch.nn.Parameter]:
    """Return {name: parameter}. TypeError or ValueError, which name the argument, if it is in another form."""
    if isinstance(parameters, torch.nn.Module):
        return dict(parameters.named_parameters())
    if not isinstance(parameters, Iterable):
        raise TypeError(f"{argument} must be the model or model.named_parameters(), got {type(parameters).__name__}")
    by_name: dict[str, torch.nn.Parameter] = {}
    for pair in list(parameters.items() if isinstance(parameters, Mapping) else parameters):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                f"{argument} must be the model or (name, parameter) pairs, as from model.named_parameters(); got "
                f"entries of type {type(pair).__name__}"
            )
        name, parameter = pair
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"{name}: a parameter must be a torch.Tensor, got {type(parameter).__name__}")
        if name in by_name:
            raise ValueError(
                f"{argument} must have unique names, got {name!r} twice: of several models, pass "
                "torch.nn.ModuleList(models).named_parameters()"
            )
        by_name[name] = parameter
    return by_name


def _check_supported(name: str, parameter: torch.Tensor) -> None:
    """Raise TypeError or ValueError if no compressor can have a parameter of this dtype, or on this device."""
    if parameter.dtype not in DTYPES and parameter.requires_grad:
        raise TypeError(f"{name}: gradients must be float32, float64, float16 or bfloat16, got {parameter.dtype}")
    if parameter.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: parameters must be on the CPU or on CUDA devices, got {parameter.device}")


def _device_of(parameters: dict[str, torch.nn.Parameter]) -> torch.device:
    """Return the device of the parameters; raise ValueError if they are on several devices."""
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


def _parameter_of_caller():
    """Return the local variable `p` of Horovod's `_allreduce_grad_async`; None if another function called."""
    callers = [frame for frame in frames(10) if frame.f_code.co_name == "_allreduce_grad_async"]
    return local(callers[0], "p") if callers else None
