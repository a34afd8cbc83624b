"""With density 1, results equal Horovod's dense results, for every reduction and type."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
import tiers
from gradients import draw, whole_numbers
from tf_helpers import as_gradients, make_variables, reduce_through_tape, several

from hvd_sparse.schedule import Schedule
from hvd_sparse.tensorflow import Compression

SHAPES = {"weight": (30, 20), "bias": (20,), "scale": ()}
REDUCTIONS = {
    "sum": {"op": hvd.Sum},
    "predivide": {"op": hvd.Average, "gradient_predivide_factor": 4.0},
    "predivide_odd": {"op": hvd.Average, "gradient_predivide_factor": 1.7},
    "one_group": {"op": hvd.Average, "groups": 1},
    "two_groups": {"op": hvd.Sum, "groups": 2},
    # not in the order of the gradients; Horovod gives the bias a separate group
    "listed_groups": {"op": hvd.Average, "groups": [["scale", "weight"]]},
}


class AtPresentDense(Schedule):
    """Everything is sent dense now, but the graph must support the other case."""

    def density(self, step):
        return 1.0

    def describe(self):
        return "at present dense"


EVERYTHING = {  # ways to send every element
    "dense": ("gradient_dropping", {"density": 1.0}),
    "at present dense": ("gradient_dropping", {"density": AtPresentDense(), "scope": "model", "min_numel": 100}),
    "in payloads": ("dgc", {"density": 0.9999, "momentum": 0.0, "min_numel": 0, "dense_fallback": None}),  # k = n
}


def make_trials(dtype=tf.float32):
    """Return {title: (variables, compression)} of all methods that send everything."""
    trials = {}
    for title, (method, settings) in EVERYTHING.items():
        variables = make_variables(SHAPES, dtype)
        trials[title] = variables, getattr(Compression, method)(list(variables.values()), **settings)
    return trials


def reduce_all(trials, gradients, groups=None, **options):
    """Return {title: {name: reduced}} of the same gradients, in one graph."""

    @tf.function(autograph=False)  # with it: test_models.py
    def reduce():
        reduced = {}
        for title, (variables, compression) in trials.items():
            listed = [[variables[name] for name in group] for group in groups] if isinstance(groups, list) else groups
            own = as_gradients(variables, gradients)
            reduced[title] = reduce_through_tape(variables, own, compression, groups=listed, **options)
        return reduced

    return reduce()


@several
@pytest.mark.parametrize("reduction", tiers.choice(REDUCTIONS, "sum", "predivide_odd", "listed_groups"))
def test_one_step_is_horovods(reduction):
    options = REDUCTIONS[reduction]
    gradients = whole_numbers(SHAPES, 3, hvd.rank())
    exact = {name: sum(whole_numbers(SHAPES, 3, rank)[name] for rank in range(hvd.size())) for name in SHAPES}
    trials = make_trials()
    reduced = reduce_all({"horovod": (make_variables(SHAPES), Compression.none), **trials}, gradients, **options)
    for title, (_, compression) in trials.items():
        assert compression.stats()["steps"] == 1 and compression.stats()["total"]["density"] == 1.0
        for name in SHAPES:
            where = f"{title}: {name}"
            found, dense = reduced[title][name].numpy(), reduced["horovod"][name].numpy()
            np.testing.assert_allclose(found, dense, rtol=4e-7, atol=2e-5, err_msg=where)
            if options["op"] == hvd.Sum:
                np.testing.assert_array_equal(found, exact[name], err_msg=where)


EPS = {tf.float64: 2.0**-52, tf.float32: 2.0**-23, tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7}


@several
@pytest.mark.parametrize("dtype", [tf.float64, tf.float16, tf.bfloat16], ids=lambda dtype: dtype.name)
def test_every_type_is_reduced_as_horovod_reduces_it(dtype):
    """Horovod refuses bfloat16: there the oracle is the mean, rounded once."""
    drawn = [{n: g / 3.0 for n, g in draw(SHAPES, 5, rank).items()} for rank in range(hvd.size())]
    trials = make_trials(dtype)
    horovod = {} if dtype == tf.bfloat16 else {"horovod": (make_variables(SHAPES, dtype), Compression.none)}
    reduced = reduce_all({**horovod, **trials}, drawn[hvd.rank()])
    if not horovod:
        like = make_variables(SHAPES, dtype)
        rounded = [{n: tf.cast(g, tf.float64) for n, g in as_gradients(like, one).items()} for one in drawn]
        reduced["horovod"] = {name: tf.add_n([one[name] for one in rounded]) / hvd.size() for name in SHAPES}
    for title in trials:
        eps = EPS[dtype] if "dense" in title else max(EPS[dtype], EPS[tf.float32])  # payloads are of float32
        for name in SHAPES:
            found = reduced[title][name]
            assert found.dtype == dtype and found.shape == SHAPES[name]
            found, expected = (tf.cast(x, tf.float64).numpy() for x in (found, reduced["horovod"][name]))
            np.testing.assert_allclose(found, expected, rtol=2 * eps, atol=4 * eps, err_msg=f"{title}: {name}")


SGD = {
    "momentum": {"momentum": 0.9, "density": 1.0},
    "nesterov": {"momentum": 0.9, "nesterov": True, "density": 1.0, "scope": "model"},
    "decay": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "density": AtPresentDense()},
    # factor masking would clear the momentum of all sent elements
    "in payloads": {
        "momentum": 0.8,
        "weight_decay": 0.1,
        "density": 0.9999,
        "min_numel": 0,
        "factor_masking": False,
        "dense_fallback": None,
    },
}


class Momentum:
    """TensorFlow's own kernel of SGD with momentum, with weight decay as in DGC."""

    def __init__(self, variables, momentum=0.0, nesterov=False, weight_decay=0.0, lr=0.1, **_):
        self._accumulators = {name: tf.Variable(tf.zeros_like(v)) for name, v in variables.items()}
        self._variables, self._momentum, self._nesterov = variables, momentum, nesterov
        self._weight_decay, self._lr = weight_decay, lr

    def descend(self, gradients):
        for name, variable in self._variables.items():
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle,
                accum=self._accumulators[name].handle,
                lr=self._lr,
                grad=gradients[name] + self._weight_decay * variable,
                momentum=self._momentum,
                use_nesterov=self._nesterov,
            )


@several
def test_dgc_at_density_one_is_tensorflows_momentum():
    """30 steps; all variants side by side, in one graph."""
    shapes = {"weight": (30, 20), "bias": (20,)}
    pairs = []
    for title, settings in SGD.items():
        plain, ours = make_variables(shapes), make_variables(shapes)
        compression = Compression.dgc(list(ours.values()), **settings)
        pairs.append((title, plain, Momentum(plain, **settings), ours, Momentum(ours), compression))

    @tf.function(autograph=False)  # with it: test_models.py
    def descend(gradients):
        for _, plain, momentum, ours, sgd, compression in pairs:
            momentum.descend(reduce_through_tape(plain, gradients, Compression.none, gradient_predivide_factor=2.0))
            sgd.descend(reduce_through_tape(ours, gradients, compression, gradient_predivide_factor=2.0))

    start = {name: variable.numpy() for name, variable in make_variables(shapes).items()}
    for t in range(30):
        descend(as_gradients(start, draw(shapes, t, hvd.rank())))
    for title, plain, _, ours, _, _ in pairs:
        for name in shapes:
            found, expected = ours[name].numpy(), plain[name].numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5, err_msg=f"{title}: {name}")
            assert (found != start[name]).any()


@pytest.mark.rank_counts
@pytest.mark.skipif(hvd.size() > 1, reason="what a lone process does")
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_lone_process_gets_its_gradients_back(graph):
    variables = make_variables(SHAPES)
    compression = Compression.dgc(list(variables.values()), 0.01, momentum=0.9)
    gradients = whole_numbers(SHAPES, 0, 0)

    def reduce():
        return reduce_through_tape(variables, as_gradients(variables, gradients), compression)

    for _ in range(2):
        reduced = tf.function(reduce)() if graph else reduce()
        for name in SHAPES:
            np.testing.assert_array_equal(reduced[name], gradients[name])
    assert compression.stats()["steps"] == 0 and compression.step.numpy() == 0
