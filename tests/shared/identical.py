"""Comparison of nested states: equal in types, dtypes, shapes and bits."""

import numpy as np


def assert_identical(found, expected, place="state"):
    """Assert that two states of lists, tuples, dicts, arrays and numbers are the same, and so is the order of keys."""
    assert type(found) is type(expected), place
    if isinstance(expected, dict):
        assert_identical(list(found), list(expected), f"{place}'s keys")
        for key, item in expected.items():
            assert_identical(found[key], item, f"{place}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_identical(*pair, f"{place}[{number}]")
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert found.tobytes() == expected.tobytes(), place
    else:
        assert repr(found) == repr(expected), place  # -0.0 and NaN, too
