"""Hierarchical exchange with a tape: nothing is lost, and results equal PyTorch's."""

import functools

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from gradients import SHAPES, draw, whole_numbers
from oracle import CLEAR_GAP, Method, train
from test_tape_conservation import NowAndThenDense
from tf_helpers import Reducer, assert_alive, assert_ranks_agree, make_variables, reduce_whole_numbers, total

from hvd_sparse.schedule import Schedule
from hvd_sparse.tensorflow import Compression
from hvd_sparse.tensorflow.codecs.owned_regions import Scattered

pytestmark = pytest.mark.skipif(hvd.size() == 1, reason="hosts of several ranks need several ranks")

LAYOUTS = sorted({1, hvd.size(), *([2] if hvd.size() % 2 == 0 else [])})


def whole(compression, name, kind="residual"):
    """Return the sum over all ranks of a buffer: shards lie side by side, hosts are added."""
    return compression.state_dict(summed=True)["memory"][name][kind].astype(np.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("gradient_dropping", {"scope": "tensor"}),
        pytest.param("gradient_dropping", {"scope": "model", "values": "float16"}, marks=pytest.mark.exhaustive),
        pytest.param("gradient_dropping", {"density": NowAndThenDense()}, marks=pytest.mark.exhaustive),
        ("gradient_dropping", {"density": NowAndThenDense(), "granularity": "channel"}),
        pytest.param("topk", {}, marks=pytest.mark.exhaustive),
        ("gradient_dropping", {"between_hosts": "reduce_scatter"}),
        ("topk", {"between_hosts": "reduce_scatter", "complete": True}),
        ("micro", {}),
        pytest.param("cltk", {}, marks=pytest.mark.exhaustive),
        pytest.param("random_k", {}, marks=pytest.mark.exhaustive),
    ],
    ids=["tensor", "model", "dense", "dense channels", "topk", "scattered", "completed", "micro", "cltk", "random_k"],
)
@pytest.mark.each_value
def test_nothing_is_lost(method, settings, graph, layout, tmp_path):
    variables = make_variables()
    settings = {"density": 0.05, "dense_fallback": None} | settings
    compression = getattr(Compression, method)(
        list(variables.values()), min_numel=100, exchange="hierarchical", ranks_per_host=layout, **settings
    )
    fed, out = reduce_whole_numbers(Reducer(variables, compression, graph, op=hvd.Sum), 7)
    for name, shape in SHAPES.items():
        left = whole(compression, name).reshape(shape) if np.prod(shape) >= 100 else 0.0
        np.testing.assert_allclose(out[name] + left, fed[name], rtol=0, atol=1e-3, err_msg=name)
    assert compression.feedback["head.weight"].size <= -(-500 // layout)
    saved = tf.train.Checkpoint(compression=compression).save(str(tmp_path / "checkpoint"))
    kept = [name for name, _ in tf.train.list_variables(saved) if "/feedback/" in name]
    assert kept and all("/buffers/" in name for name in kept), "a checkpoint of a compressor has no weights"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["dgc", "samomentum", "gradient_dropping"])
def test_it_is_the_method_with_a_rank_for_each_host(method, layout):
    """Whose tensors are the shards."""
    hosts = [list(range(begin, begin + layout)) for begin in range(0, hvd.size(), layout)]
    cut = [480 * shard // layout for shard in range(layout + 1)]
    settings = {"density": 0.05, "min_numel": 0}
    settings |= {} if method == "gradient_dropping" else {"momentum": 0.8}

    def of_host(step, host, seed):
        added = sum(draw({"w": (480,)}, step, rank, seed)["w"].astype(np.float32) for rank in hosts[host])
        return {f"w{shard}": added[cut[shard] : cut[shard + 1]].astype(np.float64) for shard in range(layout)}

    start = {f"w{shard}": np.zeros(480 // layout) for shard in range(layout)}
    for seed in range(20):
        oracle = Method(samomentum=method == "samomentum", **settings)
        expected = train(oracle, start, functools.partial(of_host, seed=seed), len(hosts), 20, 1.0, average=False)
        if expected.gap > 10 * CLEAR_GAP:
            break
    variables = {"w": tf.Variable(tf.zeros([480]), name="w")}
    compression = getattr(Compression, method)(
        list(variables.values()), exchange="hierarchical", ranks_per_host=layout, dense_fallback=None, **settings
    )
    reduce = Reducer(variables, compression, op=hvd.Sum)
    found = -sum(reduce(draw({"w": (480,)}, step, hvd.rank(), seed))["w"] for step in range(20))
    wanted = np.concatenate([expected.parameters[f"w{shard}"] for shard in range(layout)])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    "method", ["dgc", "samomentum", pytest.param("gradient_dropping", marks=pytest.mark.exhaustive), "topk"]
)
def test_between_hosts_of_one_rank_it_is_the_flat_reduce_scatter(method, complete):
    between = {"exchange": "hierarchical", "ranks_per_host": 1, "between_hosts": "reduce_scatter"}
    results = []
    for exchange in ({"exchange": "reduce_scatter"}, between):
        variables = make_variables()
        settings = {"density": 0.05, "min_numel": 100, "dense_fallback": None, "complete": complete}
        compression = getattr(Compression, method)(list(variables.values()), **settings, **exchange)
        reduce = Reducer(variables, compression)
        results.append([reduce(draw(SHAPES, step, hvd.rank())) for step in range(5)])
    for flat, hosted in zip(*results, strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(hosted[name], flat[name])


@pytest.mark.parametrize("options", [{"clip_norm": 3.0}, {"weight_decay": 0.01}, {"clip_norm": 5.0, "scope": "model"}])
def test_clipping_and_decay_are_those_of_a_gather(options):
    """One rank a host: the same numbers as without hosts."""
    if "scope" in options:
        options = {**options, "clip_scope": "model"}
    results = []
    for exchange in ({}, {"exchange": "hierarchical", "ranks_per_host": 1}):
        variables = make_variables()
        compression = Compression.dgc(
            list(variables.values()), 0.05, min_numel=100, dense_fallback=None, **options, **exchange
        )
        reduce = Reducer(variables, compression)
        results.append([reduce(draw(SHAPES, step, hvd.rank())) for step in range(4)])
    for plain, hosted in zip(*results, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(hosted[name], plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("between", ["gather", "reduce_scatter"])
@pytest.mark.parametrize("summed", [False, True])
def test_a_state_goes_on(summed, between, layout):
    exchange = {"exchange": "hierarchical", "between_hosts": between}
    make = functools.partial(Compression.dgc, density=0.05, min_numel=100, dense_fallback=None, **exchange)
    variables = make_variables()
    first = make(list(variables.values()), ranks_per_host=layout)
    reduce = Reducer(variables, first, op=hvd.Sum)
    for step in range(4):
        reduce(draw(SHAPES, step, hvd.rank()))
    saved = first.state_dict(summed=summed)
    others = make_variables()
    second = make(list(others.values()), ranks_per_host=1 if summed else layout)
    second.load_state_dict(saved)
    for name in ("body.weight", "head.weight"):
        for kind in ("residual", "velocity"):
            np.testing.assert_allclose(whole(second, name, kind), whole(first, name, kind), rtol=1e-6, atol=1e-6)
    if not summed:
        again = Reducer(others, second, op=hvd.Sum)
        for step in range(4, 8):
            gradients = draw(SHAPES, step, hvd.rank())
            expected, found = reduce(gradients), again(gradients)
            for name in SHAPES:
                np.testing.assert_array_equal(found[name], expected[name])


def test_before_the_variables_are_known_a_rank_reads_its_state_alone():
    """To find the hosts would wait for the other ranks."""
    made: dict[str, list] = {"first": [], "second": []}
    first, second = (
        Compression.dgc(lambda own=own: own, 0.05, min_numel=100, exchange="hierarchical", ranks_per_host=1)
        for own in made.values()
    )
    early = first.state_dict() if hvd.rank() == 0 else None
    assert_alive()  # what the others do meanwhile
    reducers = []
    for name, compression in (("first", first), ("second", second)):
        variables = make_variables()
        made[name] += variables.values()
        reducers.append(Reducer(variables, compression))
    for t in range(3):
        reducers[0](draw(SHAPES, t, hvd.rank()))
    first.load_state_dict(early or second.state_dict())
    for t in range(3):
        found, wanted = (reduce(draw(SHAPES, t, hvd.rank())) for reduce in reducers)
        assert all((found[name] == wanted[name]).all() for name in SHAPES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_hosts(layout):
    variables = make_variables()
    compression = Compression.gradient_dropping(
        list(variables.values()), 0.05, min_numel=100, exchange="hierarchical", ranks_per_host=layout
    )
    reduce = Reducer(variables, compression, op=hvd.Sum)
    lost = {name: np.zeros(SHAPES[name]) for name in ("body.weight", "head.weight")}
    for step in range(3):
        gradients = {name: np.array(value) for name, value in whole_numbers(SHAPES, step, hvd.rank()).items()}
        for name in lost:
            lost[name] += total(gradients[name])
        if step == 1 and hvd.rank() == 0:
            gradients["head.weight"][3] = np.inf
        reduced = reduce(gradients)
        assert all(np.isnan(result).all() == (step == 1) for result in reduced.values())
        for name in lost if step != 1 else ():
            lost[name] -= reduced[name]
    for name in lost:  # what was finite is kept
        lost[name] -= whole(compression, name).reshape(SHAPES[name])
        lost[name].reshape(-1)[3 if name == "head.weight" else slice(0)] = 0.0
        assert not lost[name].any()


def reduce_with(method, shapes, layout, **settings):
    """Return a reducer of new variables of these shapes, to their sums."""
    variables = make_variables(shapes)
    hosts = {"exchange": "hierarchical", "ranks_per_host": layout, "dense_fallback": None}
    return Reducer(variables, getattr(Compression, method)(list(variables.values()), **settings, **hosts), op=hvd.Sum)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_variable_with_fewer_elements_than_a_host_has_ranks_is_sent_dense(layout):
    shapes = {"w": (480,), "scale": ()}
    reduce = reduce_with("gradient_dropping", shapes, layout, density=0.05, min_numel=0)
    for step in range(3):
        gradients = whole_numbers(shapes, step, hvd.rank())
        reduced = reduce(gradients)
        assert_ranks_agree(reduced)
        np.testing.assert_array_equal(reduced["scale"], total(gradients["scale"]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_may_have_small_gradients_only(layout):
    shapes = {"bias": (20,), "scale": ()}
    reduce = reduce_with("dgc", shapes, layout, momentum=0.0)
    for step in range(2):
        gradients = whole_numbers(shapes, step, hvd.rank())
        reduced = reduce(gradients)
        for name in shapes:
            np.testing.assert_array_equal(reduced[name], total(gradients[name]))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout < hvd.size()])
def test_hosts_agree_on_regions_in_the_first_step_only(layout, monkeypatch):
    """Though the columns of hosts have different regions."""
    agreed, split = [], Scattered.split

    def noted(message, agrees, *arguments):
        agreed.append(bool(agrees))
        return split(message, agrees, *arguments)

    monkeypatch.setattr(Scattered, "split", noted)
    reduce = reduce_with("topk", {"w": (480,)}, layout, density=0.05, min_numel=0, between_hosts="reduce_scatter")
    for step in range(5):
        assert_ranks_agree(reduce(draw({"w": (480,)}, step, hvd.rank())))
    assert agreed == [True] + [False] * 4


class EverDense(Schedule):
    """Each step could be one of payloads, and none is."""

    def density(self, step):
        return 1.0

    def describe(self):
        return "ever dense"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dense_step_counts_the_elements_of_a_shard(layout):
    reduce = reduce_with("topk", {"w": (480,)}, layout, density=EverDense(), min_numel=0)
    reduce(draw({"w": (480,)}, 0, hvd.rank()))
    assert reduce.compression.stats()["step"]["density"] == pytest.approx(1.0 / layout)


def test_hosts_of_one_rank_send_what_a_gather_sends():
    shapes, ratios = {"w": (4000,)}, []
    for exchange in ({}, {"exchange": "hierarchical", "ranks_per_host": 1}):
        variables = make_variables(shapes)
        compression = Compression.topk(list(variables.values()), density=0.01, dense_fallback=None, **exchange)
        Reducer(variables, compression)(draw(shapes, 0, hvd.rank()))
        ratios.append(compression.stats()["step"]["ratio"])
    assert ratios[1] > 0.8 * ratios[0] > 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_velocity_beyond_float16_is_sent_in_parts(layout):
    """Dense: momentum 0.75 makes four times the gradient of it, which is 30,720. All comes, later."""
    variables = make_variables({"w": (40, 50)}, tf.float16)
    hosts = {"exchange": "hierarchical", "ranks_per_host": layout, "dense_fallback": None}
    reduce = Reducer(variables, Compression.dgc(list(variables.values()), EverDense(), momentum=0.75, **hosts))
    fed, velocity, moved = 0.0, 0.0, np.zeros((40, 50))
    for step in range(30):
        gradient = 30720.0 if step < 6 else 0.0
        velocity = 0.75 * velocity + gradient
        fed += velocity
        reduced = reduce({"w": np.full((40, 50), gradient)})
        assert np.isfinite(reduced["w"]).all()
        assert_ranks_agree(reduced)
        moved += reduced["w"]
    np.testing.assert_allclose(moved, fed, rtol=2e-2)


def test_stats_after_another_rank_has_ended(monkeypatch):
    """Horovod then shuts down everywhere, and knows only the set of all ranks any more."""
    variables = make_variables({"w": (40, 50)})
    hosts = {"exchange": "hierarchical", "ranks_per_host": hvd.size(), "min_numel": 100}
    compression = Compression.topk(list(variables.values()), 0.01, **hosts)
    Reducer(variables, compression)({"w": np.ones((40, 50))})
    expected = compression.stats()["dense_fallback"]

    def size():
        """Fail as Horovod does."""
        raise ValueError("Process set does not exist or has not been registered.")

    monkeypatch.setattr(compression.hosts.column.process_set, "size", size)
    assert compression.stats()["dense_fallback"] == expected


@pytest.mark.rank_counts
def test_uneven_hosts_are_refused():
    if hvd.size() < 3:
        pytest.skip("hosts with different numbers of ranks need three ranks")
    layout = [hvd.size() - 1, 1]
    with pytest.raises(ValueError, match="all hosts must have the same number of ranks"):
        Compression.dgc(list(make_variables().values()), exchange="hierarchical", ranks_per_host=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dgc", {"scope": "model", "clip_norm": 9.0, "clip_scope": "model", "between_hosts": "reduce_scatter"}),
        pytest.param("dgc", {"clip_norm": 9.0, "weight_decay": 0.05}, marks=pytest.mark.exhaustive),
        pytest.param("samomentum", {"weight_decay": 0.05}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_loss_scale_changes_nothing_but_the_gradients(method, settings, layout):
    """Powers of two are exact: gradients and error feedback equal those of a run without a scale, bit for bit."""
    found = []
    for scales in ((1.0,), (65536.0, 4096.0, 4096.0, 2.0)):
        reduce, steps = reduce_with(method, SHAPES, layout, density=0.05, min_numel=100, **settings), []
        for step in range(9):
            reduce.compression.loss_scale = scale = scales[step % len(scales)]
            gradients = {name: gradient * scale for name, gradient in draw(SHAPES, step, hvd.rank()).items()}
            reduced = reduce(gradients)
            assert_ranks_agree(reduced)
            steps.append({name: result / scale for name, result in reduced.items()})
        found.append((steps, reduce.compression.state_dict()["memory"]))
    (plain, kept), (scaled, kept_scaled) = found
    for one, other in zip(plain, scaled, strict=True):
        for name, shape in SHAPES.items():
            tolerance = 0.0 if np.prod(shape) >= 100 else 1e-5  # an all-reduce may add in another order
            np.testing.assert_allclose(other[name], one[name], rtol=tolerance, atol=tolerance, err_msg=name)
    for name, buffers in kept.items():
        for kind, values in buffers.items():
            np.testing.assert_array_equal(kept_scaled[name][kind], values, err_msg=f"{name}.{kind}")
    assert kept["head.weight"]["residual"].any()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("elastic job", 'does not work in elastic jobs: take "gather" or "reduce_scatter"'),
        ("process set", r"needs all ranks of the job: leave out process_set, got ranks \[0\]"),
        ("before hvd.init()", r"needs to know the hosts: call hvd\.init\(\) first"),
    ],
)
def test_it_is_refused_where_the_ranks_are_not_those_of_the_job(where, message, monkeypatch):
    settings = {"process_set": hvd.add_process_set([0])} if where == "process set" else {}
    if where == "elastic job":
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    elif where == "before hvd.init()":
        monkeypatch.setattr(hvd, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=message):
        Compression.gradient_dropping([tf.Variable(tf.zeros([300]))], 0.05, exchange="hierarchical", **settings)
    assert_alive()
