"""Weight decay: one number for all parameters, or one per parameter."""

from collections.abc import Callable, Iterable, Mapping

from hvd_sparse.checks import check_names, check_number, takes_name_and_parameter

WeightDecay = float | Mapping[str, float] | Callable[[str, object], float]


def weight_decays(given: WeightDecay, parameters: Iterable[tuple[str, object]]) -> dict[str, float]:
    """Return {name: weight decay} of (name, parameter) pairs; TypeError or ValueError, naming what is wrong."""
    check_weight_decay(given)
    pairs = list(parameters)
    if isinstance(given, Mapping):
        check_names("weight_decay", given, [name for name, _ in pairs])
        return {name: float(given.get(name, 0.0)) for name, _ in pairs}
    if not callable(given):
        return {name: float(given) for name, _ in pairs}
    returned = {name: given(name, parameter) for name, parameter in pairs}
    for name, value in returned.items():
        check_decay(f"what weight_decay returns for {name!r}", value)
    return {name: float(value) for name, value in returned.items()}


def describe(decays: Mapping[str, float]) -> list[str]:
    """Return one line for each parameter with weight decay, for the configuration check across ranks."""
    return [f"weight_decay of {name} = {decay!r}" for name, decay in sorted(decays.items()) if decay]


def check_weight_decay(given: WeightDecay) -> None:
    """Raise TypeError or ValueError unless it is a number, a mapping of names to numbers, or a function."""
    if isinstance(given, Mapping):
        for name, value in given.items():
            check_decay(f"weight_decay[{name!r}]", value)
    elif not callable(given):
        check_decay("weight_decay", given)
    elif not takes_name_and_parameter(given):
        raise TypeError(f"weight_decay must be a function of name and parameter, got {given!r} of other arguments")


def check_decay(what: str, value) -> None:
    """Raise TypeError or ValueError unless value is a finite number of at least 0."""
    check_number(what, value, "at least 0", lambda number: number >= 0.0)
