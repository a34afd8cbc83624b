"""The parameters that are sent dense whatever their size: a collection of names, or a function of each parameter."""

from collections.abc import Callable, Collection, Iterable, Mapping

from hvd_sparse.checks import check_bool, check_names, takes_name_and_parameter

DenseParameters = Collection[str] | Callable[[str, object], bool]
EXPECTED = "a collection of parameter names, or a function of name and parameter"


def checked_dense(given: DenseParameters) -> tuple[str, ...] | Callable[[str, object], bool]:
    """Return sorted names without repetitions, or the function; TypeError for anything else."""
    if callable(given):
        if not takes_name_and_parameter(given):
            raise TypeError(f"dense must be a function of name and parameter, got {given!r} of other arguments")
        return given
    if isinstance(given, str):
        raise TypeError(f"dense must be {EXPECTED}, got the string {given!r}; for one parameter: dense=[{given!r}]")
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise TypeError(f"dense must be {EXPECTED}, got {given!r} of type {type(given).__name__}")
    names = list(given)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"dense must have names of parameters, got one of type {type(name).__name__}")
    return tuple(sorted(set(names)))


def dense_names(given: DenseParameters, parameters: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """Return the sorted names of the (name, parameter) pairs that are sent dense.

    TypeError or ValueError, naming what is wrong.
    """
    dense, pairs = checked_dense(given), list(parameters)
    if not callable(dense):
        check_names("dense", dense, [name for name, _ in pairs])
        return dense
    returned = {name: dense(name, parameter) for name, parameter in pairs}
    for name, value in returned.items():
        check_bool(f"what dense returns for {name!r}", value)
    return tuple(sorted(name for name, value in returned.items() if value))
