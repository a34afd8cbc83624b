"""Values of 2 bits or 1 with every method: the paper's numbers, nothing is lost, and the ranks agree."""

import horovod.torch as hvd
import pytest
from gradients import SHAPES, draw, shuffled, whole_numbers
from helpers import assert_ranks_agree, distributed, drive, everywhere, make_parameters, memory_of, step
from oracle import STEPS, Method
from test_conservation import Ledger
from test_oracle import Trial, run

from hvd_sparse.torch import Compression

pytestmark = pytest.mark.each_value

SETTINGS = {"density": 0.1, "min_numel": 100}
METHODS = {
    "dgc": {**SETTINGS, "momentum": 0.0},
    "dgc model": {**SETTINGS, "momentum": 0.0, "scope": "model"},
    "gradient_dropping": SETTINGS,
    "gradient_dropping model": {**SETTINGS, "scope": "model"},
    "topk": SETTINGS,
    "dct": {**SETTINGS, "lifespan": 5},
    "hard_threshold": {"value": 60.0, "min_numel": 100},
    "sidco": SETTINGS,
    "cltk": SETTINGS,
    "micro": SETTINGS,
    "random_k": SETTINGS,
}
FORMS = [
    {"values": values, "level": level, "granularity": granularity}
    for values in ("int2", "int1")
    for level in ("mean", "min")
    for granularity in ("tensor", "channel")
]


@pytest.fixture(params=METHODS)
def make(request):
    """Every method in turn."""
    method = getattr(Compression, request.param.split()[0])
    return lambda named, **settings: method(named, **{**METHODS[request.param], **settings})


@pytest.mark.parametrize("values", ["int2", "int1"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_what_is_sent_is_signs_and_the_papers_levels(values, granularity):
    """Over many steps, residual and velocity with it."""
    trials = []
    for number, (method, settings, also) in enumerate(
        [
            ("gradient_dropping", {"scope": "tensor"}, {}),
            ("gradient_dropping", {"scope": "model", "level": "min"}, {}),
            ("dgc", {"scope": "tensor", "momentum": 0.9, "weight_decay": 0.01}, {}),
            ("samomentum", {"scope": "tensor", "momentum": 0.7}, {"samomentum": True}),
            ("dgc", {"scope": "model", "momentum": 0.7, "nesterov": True, "level": "min"}, {}),
            ("topk", {"scope": "model"}, {}),
            ("dct", {"lifespan": 7}, {}),
            ("cltk", {}, {"cyclic": True, "scope": "model"}),
        ]
    ):
        settings = {**SETTINGS, **settings, "values": values, "granularity": granularity}
        build = getattr(Compression, method)
        trials.append(
            Trial(
                f"{method}.{number}",
                Method(**settings, **also),
                lambda named, build=build, settings=settings: build(named, **settings),
                STEPS,
            )
        )
    run(trials, STEPS)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(form.values()))
def test_nothing_is_lost(make, form):
    """Whole numbers stay whole with level "min", and then every sum is exact; means are rounded in every step."""
    parameters = make_parameters()
    compression = make(parameters.items(), **form)
    ledger = Ledger(parameters)
    for t in range(15):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        ledger.feed(gradients)
        ledger.receive(drive(compression, parameters, gradients, order=shuffled(SHAPES, t, hvd.rank())))
    tolerance = 0.0 if form["level"] == "min" else 15 * 2e-4 * hvd.size()
    assert ledger.check(compression, tolerance) > 0.0


@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]], ids=lambda form: " ".join(form.values()))
def test_ranks_agree_bit_for_bit(make, form):
    parameters = make_parameters()
    compression = make(parameters.items(), **form)
    optimizer = distributed(parameters, compression)
    for t in range(10):
        step(optimizer, parameters, draw(SHAPES, t, hvd.rank()), shuffled(SHAPES, t, hvd.rank()))
    assert_ranks_agree(parameters)
    assert all(everywhere(bool((memory_of(compression, parameters, "head.weight") != 0).any())))


@pytest.mark.parametrize("method", ["gradient_dropping", "topk", "micro"])
def test_bits_travel_in_place_of_numbers(method):
    """k = 4000 of 40,000: 16 bits of position each where there are any, then 32, 2 or 1 of value."""
    shapes, sizes = {"only": (200, 200)}, {}
    for values in ("float32", "int2", "int1"):
        parameters = make_parameters(shapes)
        compression = getattr(Compression, method)(parameters.items(), density=0.1, values=values)
        drive(compression, parameters, draw(shapes, 0, hvd.rank()))
        sizes[values] = compression.stats()["step"]["payload_bytes"]
    assert sizes["float32"] - sizes["int2"] == pytest.approx(4000 * 30 / 8, rel=0.12)
    assert sizes["int2"] - sizes["int1"] == pytest.approx(4000 / 8, rel=0.12)


def test_nothing_to_send_is_sent_as_nothing():
    """Gradients of zeros: the union is empty, and so are payloads below a threshold."""
    shapes = {"only": (30, 50)}
    for method, settings in (("micro", SETTINGS), ("hard_threshold", METHODS["hard_threshold"]), ("topk", SETTINGS)):
        for granularity in ("tensor", "channel"):
            parameters = make_parameters(shapes)
            form = {"values": "int2", "granularity": granularity}
            compression = getattr(Compression, method)(parameters.items(), **settings, **form)
            for t in range(3):
                nothing = whole_numbers(shapes, t, hvd.rank(), most=0)
                assert not drive(compression, parameters, nothing)["only"].any()
            something = whole_numbers(shapes, 3, 0, most=99) if hvd.rank() == 0 else nothing
            assert drive(compression, parameters, something)["only"].any()
