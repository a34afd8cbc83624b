"""Methods with thresholds: DCT and hard threshold; and the baselines top-k and CLT-k."""

import functools

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
import tiers
from gradients import SCOPES, draw, whole_numbers
from micro_oracle import MicroOracle
from oracle import Method
from test_tape_oracle import FEW, Trial, run
from test_tape_overflow import DenseInOddSteps, spoilt
from tf_helpers import Reducer, assert_ranks_agree, make_variables, memory_of, several, total

from hvd_sparse.tensorflow import Compression

pytestmark = [several, pytest.mark.each_value]
DCT = {"density": 0.05, "min_numel": 100}
SPARSE = ("body.weight", "head.weight")
METHODS = {
    "dct": lambda variables, **settings: Compression.dct(variables, **{**DCT, "lifespan": 7, **settings}),
    "hard_threshold": lambda variables, **settings: Compression.hard_threshold(
        variables, 60.0, **{"min_numel": 100, **settings}
    ),
    "sidco": lambda variables, **settings: Compression.sidco(variables, density=0.05, min_numel=100, **settings),
    "cltk": lambda variables, **settings: Compression.cltk(
        variables, **{"density": 0.05, "min_numel": 100, **settings}
    ),
    "micro": lambda variables, **settings: Compression.micro(
        variables, **{"density": 0.05, "min_numel": 100, **settings}
    ),
    "micro_scaling": lambda variables, **settings: Compression.micro(
        variables, **{"density": 0.05, "min_numel": 100, "controller": "scaling", **settings}
    ),
    "random_k": lambda variables, **settings: Compression.random_k(
        variables, **{"density": 0.05, "min_numel": 100, **settings}
    ),
    "topk": lambda variables, **settings: Compression.topk(variables, density=0.05, min_numel=100, **settings),
}


@pytest.fixture(params=METHODS)
def make(request):
    """Every method in turn."""
    return METHODS[request.param]


def reducer(make, shapes=FEW, op=hvd.Sum, graph=True, **settings):
    variables = make_variables(shapes)
    return Reducer(variables, make(list(variables.values()), **settings), graph, op=op)


def test_they_are_those_of_the_papers():
    trials = [
        Trial(
            f"lifespan.{lifespan}.{band}",
            Method(lifespan=lifespan, band=band, **DCT),
            functools.partial(Compression.dct, lifespan=lifespan, band=band, **DCT),
            100,
        )
        for lifespan, band in ((1, 4.0), (10, None), (1000, 1.5))
    ]
    hard = functools.partial(Compression.hard_threshold, value=2.5, min_numel=100)
    trials.append(Trial("hard", Method(value=2.5), hard, 100))
    for scope in SCOPES:
        settings = {"density": 0.02, "scope": scope, "min_numel": 100}
        trials.append(Trial(f"topk.{scope}", Method(**settings), functools.partial(Compression.topk, **settings), 100))
    settings = {"density": 0.02, "min_numel": 100}
    cltk = functools.partial(Compression.cltk, **settings)
    trials.append(Trial("cltk", Method(scope="model", cyclic=True, **settings), cltk, 100))
    run(trials, 100)


def test_sidco_is_that_of_the_paper():
    trials = []
    for stages, distribution in ((1, "exponential"), (3, "gamma"), (2, "pareto")):
        settings = {"density": 0.05, "stages": stages, "distribution": distribution, "min_numel": 100}
        make = functools.partial(Compression.sidco, **settings)
        trials.append(Trial(distribution, Method(**settings), make, 100))
    run(trials, 100)


@pytest.mark.parametrize(
    "form",
    [
        {"values": "float32"},
        {"values": "bfloat16"},
        {"values": "int2", "level": "min", "granularity": "channel"},  # whole numbers stay whole
        {"values": "int1", "level": "min"},
    ],
    ids=lambda form: form["values"],
)
def test_nothing_is_lost_and_ranks_agree(make, form):
    reduce = reducer(make, **form)
    balance = {name: np.zeros(FEW[name]) for name in SPARSE}
    for t in range(20):
        gradients = whole_numbers(FEW, t, hvd.rank())
        bad = t % 5 == 2
        fed = spoilt(gradients, "head.weight", np.nan) if bad and hvd.rank() == 0 else gradients
        kept = spoilt(gradients, "head.weight", 0.0) if bad and hvd.rank() == 0 else gradients
        reduced = reduce(fed)
        assert all(bool(np.isnan(result).all()) == bad for result in reduced.values())
        assert_ranks_agree(reduced)
        for name in SPARSE:
            balance[name] += total(kept[name]) - (0.0 if bad else reduced[name])
    for name in SPARSE:
        waiting = total(memory_of(reduce.compression, name))
        np.testing.assert_array_equal(waiting, balance[name].reshape(-1), err_msg=name)
    assert reduce.compression.stats()["steps"] == 20


def test_counts_drift_until_the_threshold_is_taken_anew():
    """With a life-span of 5, the count is k in steps that renew the threshold, and differs in most other steps."""
    shapes = {"only": (1000,)}
    reduce = reducer(METHODS["dct"], shapes, lifespan=5, band=None)
    counts = []
    for t in range(20):
        reduce(draw(shapes, t, hvd.rank()))
        counts.append(round(reduce.compression.stats()["step"]["density"] * 1000))
    assert [counts[t] for t in (0, 1, 2, 4, 8, 13, 18)] == [50] * 7  # the life-span doubles up to 5
    assert sum(count == 50 for count in counts) < 10


def test_draining_sends_everything_now_and_then():
    shapes = {"a": (400,), "b": (300,)}
    reduce = reducer(METHODS["dct"], shapes, lifespan=10, drain=4, density=0.02)
    drained = np.zeros((60, 2))
    for t in range(60):
        reduce(draw(shapes, t, hvd.rank()))
        drained[t] = [not memory_of(reduce.compression, name).any() for name in shapes]
    assert_ranks_agree({"drained": drained})
    assert ((5 <= drained.sum(0)) & (drained.sum(0) <= 28)).all()  # of 60, a quarter expected: four deviations


def test_dense_steps_of_a_schedule():
    """A dense step sends the residual too, and takes no threshold."""
    reduce = reducer(METHODS["dct"], density=DenseInOddSteps())
    balance = {name: np.zeros(FEW[name]) for name in SPARSE}
    for t in range(6):
        gradients = whole_numbers(FEW, t, hvd.rank())
        reduced = reduce(gradients)
        for name in SPARSE:
            balance[name] += total(gradients[name]) - reduced[name]
            after = memory_of(reduce.compression, name)
            np.testing.assert_array_equal(total(after), balance[name].reshape(-1), err_msg=name)
            assert after.any() == (t % 2 == 0)


def test_zeros_are_never_sent(make):
    reduce = reducer(make)
    for _ in range(3):
        assert not any(result.any() for result in reduce({name: np.zeros(FEW[name]) for name in FEW}).values())


@pytest.mark.parametrize("make", tiers.choice(METHODS, "sidco", "cltk"), indirect=True)
def test_eagerly(make):
    """Of whole numbers: the order in which Horovod's own allreduce adds differs from one call to the next."""
    eager, traced = reducer(make, graph=False), reducer(make)
    for t in range(4):
        gradients = whole_numbers(FEW, t, hvd.rank())
        one, two = eager(gradients), traced(gradients)
        for name in FEW:
            np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def test_thresholds_are_in_a_checkpoint_and_in_a_state(tmp_path):
    reduce = reducer(METHODS["dct"], lifespan=50)
    for t in range(3):
        reduce(whole_numbers(FEW, t, hvd.rank()))
    state = reduce.compression.state_dict()
    checkpoint = tf.train.Checkpoint(compression=reduce.compression)
    values = checkpoint.write(str(tmp_path / "checkpoint"))
    expected = [reduce(whole_numbers(FEW, t, hvd.rank())) for t in range(3, 6)]
    checkpoint.read(values).assert_consumed()
    for wanted, t in zip(expected, range(3, 6), strict=True):
        for name, found in reduce(whole_numbers(FEW, t, hvd.rank())).items():
            np.testing.assert_array_equal(found, wanted[name], err_msg=name)
    reduce.compression.load_state_dict(state)
    for name, found in reduce(whole_numbers(FEW, 3, hvd.rank())).items():
        np.testing.assert_array_equal(found, expected[0][name], err_msg=name)


def test_ranks_that_differ_are_told(make):
    reduce = reducer(make, seed=hvd.rank())
    with pytest.raises(ValueError, match="seed"):
        reduce(draw(FEW, 0, hvd.rank()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda variables: Compression.dct(variables, lifespan=0), ValueError, "lifespan"),
        (lambda variables: Compression.dct(variables, density=0.1, sparsity=0.9), ValueError, "density or sparsity"),
        (lambda variables: Compression.dct(variables, scope="model"), TypeError, "scope"),
        (lambda variables: Compression.hard_threshold(variables, -1.0), ValueError, "value"),
        (lambda variables: Compression.topk(variables, density=0.0), ValueError, "density"),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(list(make_variables(FEW).values()))


@pytest.mark.rank_counts
def test_micro_is_that_of_the_paper_and_its_density_is_right():
    """Within 10 % of k in each step from the tenth on, also when gradients become ten times smaller."""
    n = 100_000
    scale = np.exp(1.5 * np.random.default_rng(0).standard_normal(8)).repeat(n // 8)
    shapes = {"only": (n,)}
    reduce = reducer(lambda variables: Compression.micro(variables, density=0.01, min_numel=0), shapes)
    oracle = MicroOracle(n, hvd.size(), 1000)
    for t in range(60):
        drop = 0.1 if t >= 30 else 1.0
        everyone = np.stack([draw(shapes, t, rank)["only"] * (drop * scale) for rank in range(hvd.size())])
        expected = oracle.expect(everyone)
        reduced = reduce({"only": everyone[hvd.rank()]})["only"]
        np.testing.assert_array_equal(np.asarray(reduced) != 0, expected, err_msg=f"step {t}")
        count = oracle.check(everyone, reduced)
        assert t < 10 or 900 <= count <= 1100
        assert count == round(reduce.compression.stats()["step"]["density"] * n)
