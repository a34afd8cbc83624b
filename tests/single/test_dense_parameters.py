"""The argument `dense`: what it accepts, which parameters it means, and what ranks compare."""

import inspect
from fractions import Fraction

import numpy as np
import pytest

from hvd_sparse.algorithms import CompressionMethods, Settings
from hvd_sparse.dense_parameters import dense_names

PAIRS = [(name, np.zeros(shape)) for name, shape in {"norm": (5,), "body": (3, 4), "head": (2, 5), "scale": ()}.items()]
METHODS = sorted(name for name in dir(CompressionMethods) if not name.startswith("_"))


def resolved(given, method="dgc"):
    """Return the names that settings have once they know the parameters."""
    own = {"value": 1.0} if method == "hard_threshold" else {}
    return getattr(Settings, method)(None, dense=given, **own).with_names(PAIRS)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_it_and_sends_nothing_more_dense_by_default(method):
    assert inspect.signature(getattr(Settings, method)).parameters["dense"].default == ()
    assert resolved(["head"], method).dense == ("head",)
    assert resolved((), method).compresses("head", 10_000)
    assert not resolved(["head"], method).compresses("head", 10_000)
    assert resolved(["head"], method).compresses("body", 10_000)


@pytest.mark.parametrize(
    "given",
    [
        ["scale", "norm"],
        ("norm", "scale", "norm"),
        {"scale", "norm"},
        frozenset({"scale", "norm"}),
        {"norm": 1, "scale": 2}.keys(),
        np.array(["scale", "norm"]),
        (name for name in ("scale", "norm")),
        lambda name, parameter: parameter.ndim < 2,
        lambda *both: len(both[1].shape) < 2,
    ],
)
def test_every_form_means_the_same_names(given):
    settings = resolved(given)
    assert settings.dense == ("norm", "scale")
    assert settings.describe() == resolved(["norm", "scale"]).describe()
    lines = [line for line in settings.describe() if "dense:" in line]
    assert lines == ["sent dense: norm", "sent dense: scale"]


def test_a_function_may_choose_all_or_none():
    assert resolved(lambda name, parameter: True).dense == ("body", "head", "norm", "scale")
    assert resolved(lambda name, parameter: False).dense == ()


def test_settings_of_names_can_be_compared_and_hashed():
    one, other = (Settings.topk(None, dense=names) for names in (["head", "norm"], {"norm", "head"}))
    assert one == other and hash(one) == hash(other)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ("head", TypeError, r"dense must be a collection.*got the string 'head'.*dense=\['head'\]"),
        (None, TypeError, "dense must be a collection of parameter names, or a function.*got None"),
        (True, TypeError, "dense must be.*got True of type bool"),
        (1024, TypeError, "dense must be.*got 1024 of type int"),
        (b"head", TypeError, "dense must have names of parameters, got one of type int"),
        ({"head": True}, TypeError, "dense must be.*of type dict"),
        ([Fraction(1)], TypeError, "dense must have names of parameters, got one of type Fraction"),
        ([PAIRS[0][1]], TypeError, "dense must have names of parameters, got one of type ndarray"),
        (lambda name: True, TypeError, "dense must be a function of name and parameter, got .*lambda"),
    ],
)
def test_wrong_types_are_named_before_there_are_parameters(given, error, match):
    with pytest.raises(error, match=match):
        Settings.gradient_dropping(None, dense=given)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (["hed"], ValueError, "dense has 'hed', which no parameter is called; the names are 'norm', 'body', 'head'"),
        (["head", "b", "a"], ValueError, "dense has 'a', 'b', which no parameter is called"),
        (lambda name, parameter: None, TypeError, "what dense returns for 'norm' must be True or False, got None"),
        (lambda name, parameter: 1, TypeError, "what dense returns for 'norm' must be True or False, got 1"),
    ],
)
def test_what_does_not_fit_the_parameters_is_named(given, error, match):
    with pytest.raises(error, match=match):
        dense_names(given, PAIRS)
