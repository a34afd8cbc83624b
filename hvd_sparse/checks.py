"""Checks of arguments: errors name the argument, the received value and the expected ones."""

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Collection, Mapping, Sequence

MOST_SHOWN = 3  # entries of a list in an error message


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def check_bool(name: str, value: bool) -> None:
    """Raise TypeError unless value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_keys(state: object, keys: Sequence[str]) -> None:
    """Raise ValueError unless the state of an asynchronous optimizer is a dict with these keys."""
    is_dict = isinstance(state, Mapping)
    missing = [key for key in keys if not is_dict or key not in state]
    if missing:
        found = f"a dict without {', '.join(missing)}" if is_dict else type(state).__name__
        raise ValueError(
            f"the state must be what state_dict() of an asynchronous optimizer returned, with {', '.join(keys)}; "
            f"got {found}"
        )


def check_names(argument: str, given: Collection[str], names: Sequence[str]) -> None:
    """Raise ValueError, with some of the parameters' names, if an argument has a name that none of them has."""
    unknown = sorted(set(given) - set(names), key=str)
    if unknown:
        raise ValueError(
            f"{argument} has {', '.join(map(repr, unknown[:5]))}, which no parameter is called; the names are "
            f"{', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}"
        )


def takes_name_and_parameter(function: Callable) -> bool:
    """Return whether a function can be called with two arguments, as far as its signature is known."""
    try:
        inspect.signature(function).bind("name", None)
    except TypeError:
        return False
    except ValueError:  # a built-in function whose signature is unknown
        pass
    return True


def check_number(name: str, value: float, expected: str, holds) -> None:
    """Raise TypeError unless value is a number, ValueError unless it is finite and `holds`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number {expected}, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value) or not holds(value):
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_seconds(name: str, value: float) -> None:
    """Raise TypeError unless value is a number, ValueError unless it is finite and above 0."""
    check_number(name, value, "above 0 and finite, in seconds", lambda seconds: seconds > 0.0)


def checked_density(name: str, value: float) -> float:
    """Return value as a float; TypeError unless it is a number, ValueError unless it is in (0, 1]."""
    check_number(name, value, "in (0, 1]", lambda density: 0.0 < density <= 1.0)
    return float(value)


def checked_integer(name: str, value: int, least: int | None = None, most: int | None = None) -> int:
    """Return value as Python's int; TypeError for a bool or what is no integer, ValueError if it is out of range."""
    expected = "an integer"
    if least is not None:
        expected += f" of at least {least}" if most is None else f" from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be {expected}, got {value!r} of type {type(value).__name__}")
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{name} must be {expected}, got {number}")
    return number


def some(texts: Sequence[str]) -> str:
    """Return the first texts for an error message, and how many more there are."""
    more = f" and {len(texts) - MOST_SHOWN} more" if len(texts) > MOST_SHOWN else ""
    return ", ".join(texts[:MOST_SHOWN]) + more if texts else "nothing"


def some_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks for an error message, such as "ranks 0, 2, 4 to 7"; of many, the first and a number."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:MOST_SHOWN]]
    left = sum(map(len, runs[MOST_SHOWN:]))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}{f' and {left} more' if left else ''}"
