"""Checks of arguments: errors name the argument, the received value and the expected ones."""

import math
import numbers


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def check_number(name: str, value: float, expected: str, holds) -> None:
    """Raise TypeError unless value is a number, ValueError unless it is finite and `holds`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number {expected}, got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value) or not holds(value):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
