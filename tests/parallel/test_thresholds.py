"""Methods with thresholds: DCT and hard threshold; and the baselines top-k and CLT-k."""

import functools

import horovod.torch as hvd
import numpy as np
import pytest
from gradients import SCOPES, SHAPES, draw, shuffled, whole_numbers
from helpers import assert_ranks_agree, distributed, drive, everywhere, make_parameters, memory_of, step, total
from oracle import STEPS, Method
from test_conservation import Ledger
from test_oracle import Trial, run

from hvd_sparse.torch import Compression

pytestmark = pytest.mark.each_value

DCT = {"density": 0.05, "min_numel": 100}
METHODS = {
    "dct": lambda named, **settings: Compression.dct(named, **{**DCT, "lifespan": 7, **settings}),
    "hard_threshold": lambda named, **settings: Compression.hard_threshold(named, 60.0, min_numel=100, **settings),
    "sidco": lambda named, **settings: Compression.sidco(named, density=0.05, min_numel=100, **settings),
    "cltk": lambda named, **settings: Compression.cltk(named, density=0.05, min_numel=100, **settings),
    "micro": lambda named, **settings: Compression.micro(named, density=0.05, min_numel=100, **settings),
    "micro_scaling": lambda named, **settings: Compression.micro(
        named, density=0.05, min_numel=100, controller="scaling", **settings
    ),
    "random_k": lambda named, **settings: Compression.random_k(named, density=0.05, min_numel=100, **settings),
    "topk": lambda named, **settings: Compression.topk(named, density=0.05, min_numel=100, **settings),
}


@pytest.fixture(params=METHODS)
def make(request):
    """Every method in turn."""
    return METHODS[request.param]


def test_dct_is_that_of_the_paper():
    trials = [
        Trial(
            f"lifespan.{lifespan}.{band}",
            Method(lifespan=lifespan, band=band, **DCT),
            functools.partial(Compression.dct, lifespan=lifespan, band=band, **DCT),
            STEPS,
        )
        for lifespan, band in ((1, 4.0), (10, None), (1000, None), (1000, 1.5))
    ]
    run(trials, STEPS)


def test_a_hard_threshold_sends_what_reaches_it():
    make = functools.partial(Compression.hard_threshold, value=2.5, min_numel=100)
    run([Trial("hard", Method(value=2.5), make, STEPS)], STEPS)


@pytest.mark.parametrize("distribution", ["exponential", "gamma", "pareto"])
def test_sidco_is_that_of_the_paper(distribution):
    trials = []
    for stages in (1, 3):
        settings = {"density": 0.05, "stages": stages, "distribution": distribution, "min_numel": 100}
        make = functools.partial(Compression.sidco, **settings)
        trials.append(Trial(f"{stages}", Method(**settings), make, STEPS))
    run(trials, STEPS)


@pytest.mark.parametrize("scope", SCOPES)
def test_topk_is_exact(scope):
    settings = {"density": 0.02, "scope": scope, "min_numel": 100}
    run([Trial(scope, Method(**settings), lambda named: Compression.topk(named, **settings), STEPS)], STEPS)


def test_cltk_sends_what_the_leader_selects():
    settings = {"density": 0.02, "min_numel": 100}
    method = Method(scope="model", cyclic=True, **settings)
    run([Trial("cltk", method, lambda named: Compression.cltk(named, **settings), STEPS)], STEPS)


def test_random_k_sends_the_same_few_of_all_in_turn():
    """Every rank's values at k elements, one of each of k equal parts; over the steps no element is left out."""
    shapes = {"only": (1000,)}
    parameters = make_parameters(shapes)
    compression = Compression.random_k(parameters.items(), density=0.05, min_numel=100)
    balance, sent = np.zeros(1000), np.zeros(1000, int)
    for t in range(300):
        gradients = whole_numbers(shapes, t, hvd.rank())
        balance += total(gradients["only"]).numpy()
        reduced = drive(compression, parameters, gradients)["only"].double().numpy()
        mask = reduced != 0
        np.testing.assert_array_equal(reduced[mask], balance[mask])
        assert mask.reshape(50, 20).sum(1).max() == 1 and mask.sum() >= 45  # a sum may be 0
        balance[mask] = 0.0
        sent += mask
    assert sent.min() >= 1 and sent.max() <= 40  # 15 expected
    assert compression.stats()["total"]["payload_bytes"] < 300 * (4 * 50 + 100)


def test_cltk_does_not_build_up():
    """However many ranks there are, k elements of the reduced gradient are not zero; with top-k more are."""
    shapes, found = {"only": (4000,)}, {}
    for name in ("cltk", "topk"):
        parameters = make_parameters(shapes)
        compression = METHODS[name](parameters.items())
        reduced = [drive(compression, parameters, draw(shapes, t, hvd.rank()))["only"] for t in range(5)]
        found[name] = [int((result != 0).sum()) for result in reduced]
        assert compression.stats()["step"]["density"] == 0.05
    assert found["cltk"] == [200] * 5
    assert all(200 <= count <= 200 * hvd.size() for count in found["topk"])
    assert hvd.size() == 1 or min(found["topk"]) > 200


@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16"])
def test_nothing_is_lost(make, values):
    parameters = make_parameters()
    compression = make(parameters.items(), values=values)
    ledger = Ledger(parameters)
    for t in range(20):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        ledger.feed(gradients)
        ledger.receive(drive(compression, parameters, gradients, order=shuffled(SHAPES, t, hvd.rank())))
    ledger.check(compression)


@pytest.mark.parametrize("average", [True, False])
def test_ranks_agree_bit_for_bit(make, average):
    parameters = make_parameters()
    compression = make(parameters.items())
    optimizer = distributed(parameters, compression, op=hvd.Average if average else hvd.Sum)
    for t in range(50):
        step(optimizer, parameters, draw(SHAPES, t, hvd.rank()), shuffled(parameters, t, hvd.rank()))
    assert_ranks_agree(parameters)


def test_a_tensor_that_some_ranks_do_not_have(make):
    """It comes late on the ranks that have it in the first step, and is missing on others later on."""
    parameters = make_parameters()
    compression = make(parameters.items())
    ledger = Ledger(parameters)
    for t in range(12):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        if t % 4 == 1:
            gradients.pop("head.weight")
        ledger.feed(gradients)
        ledger.receive(drive(compression, parameters, gradients))
    ledger.check(compression)


def test_counts_drift_until_the_threshold_is_taken_anew():
    """With a life-span of 5, the count is k in steps that renew the threshold, and differs in most other steps."""
    parameters = make_parameters({"only": (1000,)})
    compression = Compression.dct(parameters.items(), density=0.05, lifespan=5, min_numel=100, band=None)
    counts = []
    for t in range(20):
        drive(compression, parameters, draw({"only": (1000,)}, t, hvd.rank()))
        counts.append(round(compression.stats()["step"]["density"] * 1000))
    assert [counts[t] for t in (0, 1, 2, 4, 8, 13, 18)] == [50] * 7  # the life-span doubles up to 5
    assert sum(count == 50 for count in counts) < 10


def test_refreshes_are_spread_over_the_life_span(monkeypatch):
    """Every tensor needs a threshold in the first step; from then on they take turns, in 1, 2, 4 and then 8 steps."""
    from hvd_sparse.torch import varying_ops

    shapes = {f"t{i}": (200,) for i in range(4)}
    parameters = make_parameters(shapes)
    compression = Compression.dct(parameters.items(), density=0.05, lifespan=8, min_numel=100, band=None)
    taken, original = [], varying_ops.filter_bucket

    def count(*lists, ks, **options):
        taken.extend(k for k in ks if k > 0)
        return original(*lists, ks=ks, **options)

    monkeypatch.setattr(varying_ops, "filter_bucket", count)
    per_step = []
    for t in range(17):
        taken.clear()
        drive(compression, parameters, draw(shapes, t, hvd.rank()))
        per_step.append(len(taken))
    assert per_step == [4, 4, 2, 2, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1]


def test_draining_sends_everything_now_and_then():
    """About once in four steps a tensor's residual is empty, on every rank in the same step; otherwise it is not."""
    shapes = {"a": (400,), "b": (300,)}
    parameters = make_parameters(shapes)
    compression = Compression.dct(parameters.items(), density=0.02, lifespan=10, drain=4, min_numel=100)
    drained = []
    for t in range(60):
        drive(compression, parameters, draw(shapes, t, hvd.rank()))
        drained.append([not memory_of(compression, parameters, name).any() for name in shapes])
    assert all(each == drained for each in everywhere(drained))
    for name, times in zip(shapes, np.sum(drained, axis=0), strict=True):
        assert 5 <= times <= 28, (name, times)  # of 60, a quarter expected: four deviations


def test_zeros_are_never_sent(make):
    parameters = make_parameters()
    compression = make(parameters.items())
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(3):
        reduced = drive(compression, parameters, zeros)
        assert not any(result.any() for result in reduced.values())


def test_a_void_step_loses_nothing(make):
    parameters = make_parameters()
    compression = make(parameters.items())
    balance = {name: np.zeros(SHAPES[name]) for name in ("body.weight", "head.weight")}
    for t in range(8):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        fed = {name: np.array(gradient) for name, gradient in gradients.items()}
        bad = t % 3 == 1
        if bad and hvd.rank() == hvd.size() - 1:
            fed["head.weight"][7] = np.nan
            gradients["head.weight"][7] = 0.0
        reduced = drive(compression, parameters, fed)
        assert all(bool(result.isnan().all()) == bad for result in reduced.values())
        for name in balance:
            balance[name] += total(gradients[name]).numpy() - (0.0 if bad else reduced[name].double().numpy())
    for name, expected in balance.items():
        assert (total(memory_of(compression, parameters, name)).numpy() == expected.reshape(-1)).all(), name


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda named: Compression.dct(named, lifespan=0), ValueError, "lifespan"),
        (lambda named: Compression.dct(named, drain=0), ValueError, "drain"),
        (lambda named: Compression.dct(named, density=0.1, sparsity=0.9), ValueError, "density or sparsity"),
        (lambda named: Compression.dct(named, sparsity=1.0), ValueError, "sparsity"),
        (lambda named: Compression.dct(named, scope="model"), TypeError, "scope"),
        (lambda named: Compression.hard_threshold(named, 0.0), ValueError, "value"),
        (lambda named: Compression.hard_threshold(named, "1"), TypeError, "value"),
        (lambda named: Compression.hard_threshold(named, float("nan")), ValueError, "value"),
        (lambda named: Compression.hard_threshold(named), TypeError, "value"),
        (lambda named: Compression.topk(named, density=2.0), ValueError, "density"),
        (lambda named: Compression.cltk(named, values="int8"), ValueError, "values"),
        (lambda named: Compression.cltk(named, values="int2", level="median"), ValueError, "level"),
        (lambda named: Compression.dct(named, values="int1", granularity="row"), ValueError, "granularity"),
        (lambda named: Compression.cltk(named, scope="tensor"), TypeError, "scope"),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(make_parameters().items())


def test_sparsity_is_the_rest_of_density():
    parameters = make_parameters()
    compression = Compression.dct(parameters.items(), sparsity=0.95, min_numel=100)
    assert compression.algorithm.schedule.density(0) == pytest.approx(0.05)


def test_ranks_that_differ_are_told(make):
    parameters = make_parameters()
    compression = make(parameters.items(), seed=hvd.rank())
    if hvd.size() == 1:
        return
    with pytest.raises(ValueError, match="seed"):
        drive(compression, parameters, draw(SHAPES, 0, hvd.rank()))
