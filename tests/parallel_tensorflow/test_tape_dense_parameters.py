"""Variables in `dense` are sent dense whatever their size, while others are compressed."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
import tiers
from gradients import draw, whole_numbers
from tf_helpers import Reducer, assert_alive, assert_ranks_agree, make_variables, residual_of, several, total

from hvd_sparse.algorithms import top_k
from hvd_sparse.tensorflow import Compression

pytestmark = several

SHAPES = {"embedding": (40, 20), "body": (60, 50), "head": (20, 25), "bias": (20,)}
DENSE = ("embedding", "head")  # "bias" is below min_numel, "body" is compressed
BELOW = 40 * 20 + 1  # the min_numel below which these two are
HIERARCHICAL = {"exchange": "hierarchical", "ranks_per_host": hvd.size(), "dense_fallback": None}
WAYS = {
    "dgc": ("dgc", {"momentum": 0.5}),
    "dgc, model": ("dgc", {"momentum": 0.5, "scope": "model"}),
    "dgc, reduce-scatter": ("dgc", {"momentum": 0.5, "exchange": "reduce_scatter"}),
    "dgc, hierarchical": ("dgc", {"momentum": 0.5, **HIERARCHICAL}),
    "samomentum": ("samomentum", {"momentum": 0.5}),
}
CLIPPED = {"momentum": 0.5, "nesterov": True, "weight_decay": 0.125, "clip_norm": 9.0}
OTHERS = {
    "dgc, clipped": ("dgc", CLIPPED),
    "dgc, hosts of one": ("dgc", {**CLIPPED, **HIERARCHICAL, "ranks_per_host": 1}),
    "gradient_dropping": ("gradient_dropping", {"values": "int2"}),
    "dct": ("dct", {}),
    "micro": ("micro", {}),
    "random_k, hierarchical": ("random_k", HIERARCHICAL),
}
EVERY = WAYS | OTHERS
ROUNDING = {"rtol": 0.0, "atol": 0.0} if hvd.size() < 3 else {"rtol": 1e-6, "atol": 1e-5}  # of sums and of 1 / 3


def build(way, variables, **settings):
    method, own = EVERY[way]
    make = getattr(Compression, method)
    return make(list(variables.values()), **{"min_numel": 100, "density": 0.02, **own, **settings})


@pytest.mark.rank_counts
@pytest.mark.parametrize("way", WAYS)
def test_they_follow_momentum_sgd_while_others_are_sparse(way):
    """The velocity of the mean gradient in NumPy, float32. Momentum 0.5 of whole numbers is exact."""
    variables = make_variables(SHAPES)
    compression = build(way, variables, dense=DENSE)
    reduce = Reducer(variables, compression)
    velocity = {name: np.zeros(SHAPES[name], np.float32) for name in (*DENSE, "bias")}
    for t in range(4):
        reduced = reduce(whole_numbers(SHAPES, t, hvd.rank()))
        everyone = [whole_numbers(SHAPES, t, rank) for rank in range(hvd.size())]
        for name in velocity:
            mean = sum(one[name] for one in everyone).astype(np.float32) / np.float32(hvd.size())
            velocity[name] = np.float32(0.5) * velocity[name] + mean
            np.testing.assert_allclose(reduced[name], velocity[name], **ROUNDING, err_msg=name)
        assert 0 < np.count_nonzero(reduced["body"]) <= hvd.size() * 60
    assert compression.stats()["step"]["density"] < 0.4
    assert_ranks_agree(reduced)


@pytest.mark.parametrize(
    "way", tiers.choice([*OTHERS, "dgc, reduce-scatter"], "dct", "random_k, hierarchical", "dgc, reduce-scatter")
)
def test_it_is_all_the_same_as_below_min_numel(way):
    """Results, buffers, bytes, and the choice between payloads and dense steps."""
    found = []
    for settings in ({"dense": set(DENSE)}, {"min_numel": BELOW}):
        variables = make_variables(SHAPES)
        compression = build(way, variables, **settings)
        reduce = Reducer(variables, compression)
        results = [reduce(whole_numbers(SHAPES, t, hvd.rank())) for t in range(3)]
        found.append((results, compression.state_dict()["memory"], compression.stats()))
    (results, memory, stats), (others, other_memory, other_stats) = found
    for one, other in zip(results, others, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(one[name], other[name], **ROUNDING, err_msg=name)
    assert {name: sorted(buffers) for name, buffers in memory.items()} == {
        name: sorted(buffers) for name, buffers in other_memory.items()
    }
    for name, buffers in memory.items():
        for kind, buffer in buffers.items():
            np.testing.assert_array_equal(buffer, other_memory[name][kind], err_msg=f"{name}, {kind}")
    assert stats == other_stats


@pytest.mark.parametrize("way", ["dgc, hierarchical", "gradient_dropping", "dct", "micro"])
def test_all_variables_may_be_dense(way):
    """With whole numbers, and without momentum, results are the exact sums. The variables come late."""
    variables = make_variables(SHAPES)
    method, own = EVERY[way]
    settings = {"density": 0.02, "min_numel": 100, **own} | ({"momentum": 0.0} if "momentum" in own else {})
    compression = getattr(Compression, method)(lambda: list(variables.values()), dense=lambda name, v: True, **settings)
    reduce = Reducer(variables, compression, op=hvd.Sum)
    for t in range(2):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        reduced = reduce(gradients)
        for name in SHAPES:
            np.testing.assert_array_equal(reduced[name], total(gradients[name]), err_msg=name)
    stats = compression.stats()
    assert stats["step"]["density"] == 1.0 and stats["residual_norm"] == 0.0


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_the_dense_fallback_and_an_automatic_exchange_see_only_what_may_be_compressed(scope, monkeypatch):
    """The costs are those of a model that lacks the others."""
    told, seen = [], []
    monkeypatch.setattr(top_k, "favours_scattered", lambda selections, *rest: bool(seen.append(selections)))
    for names in (SHAPES, ("body",)):
        shapes = {name: SHAPES[name] for name in names}
        variables = make_variables(shapes)
        dense = {"dense": DENSE} if names is SHAPES else {}
        compression = Compression.topk(
            list(variables.values()), 0.02, scope=scope, exchange="auto", min_numel=100, **dense
        )
        Reducer(variables, compression)(whole_numbers(shapes, 0, hvd.rank()))
        told.append(compression.stats()["dense_fallback"])
    assert told[0] == told[1] and told[0]["payload_bytes"] > 0
    assert set(seen) == {(3000,)}


def test_a_checkpoint_continues_the_run():
    way, runs = "dgc, hierarchical", []
    for loads in (False, True):
        variables, results = make_variables(SHAPES), []
        reduce = Reducer(variables, build(way, variables, dense=DENSE))
        for t in range(4):
            if loads and t == 2:
                state = reduce.compression.state_dict()
                reduce = Reducer(variables, build(way, variables, dense=list(DENSE)))
                reduce.compression.load_state_dict(state)
            results.append(reduce(whole_numbers(SHAPES, t, hvd.rank())))
        runs.append(results)
    for one, other in zip(*runs, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(one[name], other[name], **ROUNDING, err_msg=name)


def test_a_residual_that_would_be_lost_is_refused():
    variables = make_variables(SHAPES)
    compression = build("gradient_dropping", variables)
    Reducer(variables, compression)(whole_numbers(SHAPES, 0, hvd.rank()))
    state = compression.state_dict()
    with pytest.raises(ValueError, match=r"residual that would be lost.*min_numel and the dense that it had"):
        build("gradient_dropping", variables, dense=DENSE).load_state_dict(state)
    assert_alive()


def test_names_are_those_of_weight_decay():
    """Also of layers of one name, and of a function, which gets the variable."""
    variables = [tf.Variable(tf.zeros([200]), name="kernel") for _ in range(2)]
    compression = Compression.dgc(variables, 0.05, min_numel=100, dense=["kernel#2"], weight_decay={"kernel#2": 0.1})
    shaped = Compression.topk([tf.Variable(tf.zeros([20, 20]), name="a"), *variables], dense=is_vector)
    assert compression.algorithm.dense == ("kernel#2",) and shaped.algorithm.dense == ("kernel", "kernel#2")
    gradients = [tf.fill([200], float(1 + hvd.rank())) for _ in variables]

    @tf.function(autograph=False)
    def reduce():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)])
        return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, variables)

    sparse, dense = reduce()
    assert np.count_nonzero(sparse) <= hvd.size() * 10 and np.count_nonzero(dense) == 200
    assert np.count_nonzero(residual_of(compression, "kernel")) == 190
    with pytest.raises(ValueError, match="dense has 'kernel:0', which no parameter is called; the names are 'kernel'"):
        Compression.micro(variables, dense=["kernel:0"])


def is_vector(name, variable):
    return len(variable.shape) == 1


@pytest.mark.parametrize("way", ["dgc", "dgc, hierarchical"])
def test_ranks_that_differ_are_refused_on_all_ranks(way):
    variables = make_variables(SHAPES)
    dense = ["head"] if hvd.rank() == 0 else lambda name, variable: name in DENSE
    reduce = Reducer(variables, build(way, variables, dense=dense))
    with pytest.raises(ValueError, match="rank 1 has 'sent dense: embedding' where rank 0 has nothing"):
        reduce(draw(SHAPES, 0, hvd.rank()))
    assert_alive()
