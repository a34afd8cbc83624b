"""Values of 2 bits or 1: the paper's numbers. test_tape_thresholds.py tests for every method that nothing is lost."""

import functools

import horovod.tensorflow as hvd
import pytest
import tiers
from gradients import draw
from oracle import Method
from test_tape_oracle import Trial, run
from tf_helpers import Reducer, make_variables, several

from hvd_sparse.tensorflow import Compression

pytestmark = several
SETTINGS = {"density": 0.1, "min_numel": 100}


@pytest.mark.parametrize("values", tiers.choice(["int2", "int1"], "int2"))
def test_what_is_sent_is_signs_and_the_papers_levels(values):
    """Over 60 steps, residual and velocity with it."""
    trials = []
    for number, (method, settings, also) in enumerate(
        [
            ("gradient_dropping", {"scope": "tensor"}, {}),
            ("gradient_dropping", {"scope": "model", "level": "min", "granularity": "channel"}, {}),
            ("dgc", {"scope": "tensor", "momentum": 0.9, "granularity": "channel"}, {}),
            ("dgc", {"scope": "model", "momentum": 0.7, "nesterov": True, "level": "min"}, {}),
            ("dct", {"lifespan": 7, "granularity": "channel"}, {}),
            ("cltk", {"granularity": "channel"}, {"cyclic": True, "scope": "model"}),
        ]
    ):
        settings = {**SETTINGS, **settings, "values": values}
        make = functools.partial(getattr(Compression, method), **settings)
        trials.append(Trial(f"{method}.{number}", Method(**settings, **also), make, 60))
    run(trials, 60)


@pytest.mark.parametrize("method", tiers.choice(["gradient_dropping", "topk", "micro"], "micro"))
def test_bits_travel_in_place_of_numbers(method):
    """k = 4000 of 40,000: 16 bits of position each where there are any, then 32, 2 or 1 of value."""
    shapes, sizes = {"only": (200, 200)}, {}
    for values in ("float32", "int2", "int1"):
        variables = make_variables(shapes)
        compression = getattr(Compression, method)(list(variables.values()), density=0.1, values=values)
        Reducer(variables, compression)(draw(shapes, 0, hvd.rank()))
        sizes[values] = compression.stats()["step"]["payload_bytes"]
    assert sizes["float32"] - sizes["int2"] == pytest.approx(4000 * 30 / 8, rel=0.12)
    assert sizes["int2"] - sizes["int1"] == pytest.approx(4000 / 8, rel=0.12)


def test_nothing_to_send_is_sent_as_nothing():
    """Gradients of zeros: the union is empty, and so are payloads below a threshold."""
    shapes = {"only": (30, 50)}
    for method, settings in (("micro", SETTINGS), ("hard_threshold", {"value": 1.0}), ("topk", SETTINGS)):
        for granularity in ("tensor", "channel"):
            variables = make_variables(shapes)
            form = {"values": "int2", "granularity": granularity, "min_numel": 100}
            compression = getattr(Compression, method)(list(variables.values()), **{**settings, **form})
            reduce = Reducer(variables, compression)
            something = draw(shapes, 0, hvd.rank())
            nothing = {name: value * 0.0 for name, value in something.items()}
            for _ in range(2):
                assert not reduce(nothing)["only"].any()
            assert reduce(something)["only"].any()
