"""Arguments of the methods, buckets, threshold hints, traffic counters, and the configuration check across ranks."""

import inspect
import itertools
import os
import subprocess
import sys
import textwrap
from dataclasses import fields
from functools import partial

import numpy as np
import pytest

from hvd_sparse.algorithms import Settings
from hvd_sparse.buckets import plan_buckets
from hvd_sparse.configuration_check import digest, explain_difference
from hvd_sparse.parameter_server import DGS, DCTAsync
from hvd_sparse.schedule import WarmUp
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.timeouts import timeout
from hvd_sparse.torch.traffic import Traffic


@pytest.mark.parametrize("method", [Settings.dgc, Settings.gradient_dropping])
@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("density", 0.0, ValueError),
        ("density", 1.5, ValueError),
        ("density", float("nan"), ValueError),
        ("density", "0.1", TypeError),
        ("density", True, TypeError),
        ("scope", "layer", ValueError),
        ("coding", "huffman", ValueError),
        ("values", "float64", ValueError),
        ("values", "int8", ValueError),
        ("min_numel", -1, ValueError),
        ("min_numel", 1.5, TypeError),
        ("seed", None, TypeError),
        ("bucket_bytes", "1e6", TypeError),
        ("bucket_bytes", 0, ValueError),
        ("seed", -1, ValueError),
        ("warmup", -1, ValueError),
        ("warmup", 2.5, TypeError),
    ],
)
def test_shared_arguments_name_what_is_wrong(method, argument, value, error):
    with pytest.raises(error, match=argument) as raised:
        method(None, **{argument: value})
    assert str(value).strip("'") in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"momentum": 1.0}, ValueError, "momentum"),
        ({"momentum": -0.1}, ValueError, "momentum"),
        ({"momentum": "0.9"}, TypeError, "momentum"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay"),
        ({"weight_decay": float("inf")}, ValueError, "weight_decay"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm"),
        ({"clip_scope": "layer"}, ValueError, "clip_scope"),
        ({"clip_scope": "model", "scope": "tensor", "clip_norm": 1.0}, ValueError, 'needs scope="model"'),
        ({"nesterov": 1}, TypeError, "nesterov"),
        ({"nesterov": True, "momentum": 0.0}, ValueError, "nesterov"),
        ({"factor_masking": None}, TypeError, "factor_masking"),
    ],
)
def test_arguments_of_dgc(settings, error, match):
    with pytest.raises(error, match=match):
        Settings.dgc(None, **settings)


def test_description_tells_every_setting_apart():
    base = Settings.dgc(None)
    others = [
        Settings.gradient_dropping(None, density=0.001),
        Settings.dgc(None, density=0.01),
        Settings.dgc(None, warmup=WarmUp(0.001, 100)),
        Settings.dgc(None, scope="model"),
        Settings.dgc(None, momentum=0.8),
        Settings.dgc(None, nesterov=True),
        Settings.dgc(None, weight_decay=1e-4),
        Settings.dgc(None, clip_norm=1.0),
        Settings.dgc(None, factor_masking=False),
        Settings.dgc(None, values="float16"),
        Settings.dgc(None, min_numel=1),
        Settings.dgc(None, dense=["head"]),
        Settings.dgc(None, bucket_bytes=1),
        Settings.dgc(None, seed=1),
    ]
    digests = [digest(algorithm.describe()) for algorithm in (base, *others)]
    assert len(set(digests)) == len(digests)
    assert digest(Settings.dgc(None).describe()) == digests[0]


def test_difference_names_the_rank_and_the_lines():
    first = ["density = constant(0.1)", "w: (3,) torch.float32"]
    text = explain_difference([first, first, [first[0], "w: (4,) torch.float32"]])
    assert "rank 2 has 'w: (4,) torch.float32' where rank 0 has 'w: (3,) torch.float32'" in text
    assert "rank 1" not in text
    assert "another order" in explain_difference([first, first[::-1]])


def test_buckets_depend_on_names_and_sizes_alone():
    sizes = {"d": 40, "a": 100, "c": 8, "b": 60}
    expected = {"x.0": ["a"], "x.1": ["b", "c"], "x.2": ["d"]}
    for order in itertools.permutations(sizes):
        assert plan_buckets({name: sizes[name] for name in order}, 100, "x") == expected
    assert len(plan_buckets(sizes, 1, "x")) == 4
    assert plan_buckets({}, 100, "x") == {}


def test_hint_follows_the_threshold_and_learns_from_misses():
    hint = ThresholdHint()
    assert hint.value(10) == 0.0
    hint.update(10, 4.0, 12)
    assert 0.9 * 4.0 < hint.value(10) < 4.0
    assert hint.value(11) == 0.0, "another density: the old threshold says nothing"
    before = hint.value(10)
    hint.update(10, 4.0, 9)
    after_miss = hint.value(10)
    assert after_miss < before
    for _ in range(100):
        hint.update(10, 4.0, 1000)
    assert after_miss < hint.value(10) < 4.0
    for _ in range(100):
        hint.update(10, 4.0, 0)
    assert hint.value(10) >= 0.5 * 4.0


def test_traffic_adds_up_and_nested_time_counts_once(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr("hvd_sparse.torch.traffic.perf_counter", lambda: next(clock))
    traffic = Traffic()
    with traffic.timed("decompress"), traffic.timed("exchange"):
        pass
    traffic.count(dense_bytes=4000, payload_bytes=40, elements=1000, sent=5)
    traffic.count(payload_bytes=10)
    traffic.end_step()
    summary = traffic.summary()
    assert summary["steps"] == 1
    assert summary["step"] == summary["total"]
    assert summary["step"]["ratio"] == 80.0
    assert summary["step"]["density"] == 0.005
    assert summary["step"]["seconds"] == {"compress": 0.0, "exchange": 3.0, "decompress": 7.0}
    traffic.count(dense_bytes=1)
    traffic.drop_step()
    traffic.end_step()
    assert traffic.summary()["total"]["dense_bytes"] == 4000


@pytest.mark.parametrize("number", [np.int64(7), np.int32(7), np.uint32(7)])
def test_numbers_of_numpy_are_those_of_python(number):
    """A seed is shifted and added to the step, beyond what NumPy's types hold."""
    settings = Settings.dgc(None, seed=number, min_numel=number, bucket_bytes=number)
    assert [type(one) for one in (settings.seed, settings.min_numel, settings.bucket_bytes)] == [int] * 3
    hosts = Settings.dgc(None, exchange="hierarchical", ranks_per_host=number).ranks_per_host
    assert (hosts, type(hosts)) == (7, int)
    assert Settings.micro(None, exchange="hierarchical", ranks_per_host=np.array([2, 3])).ranks_per_host == (2, 3)
    assert type(DGS(seed=number).seed) is int
    with pytest.raises(TypeError, match=r"ranks_per_host must be an integer of at least 1, got 2\.0"):
        Settings.dgc(None, exchange="hierarchical", ranks_per_host=2.0)


@pytest.mark.parametrize("make", [partial(Settings.dct, None), DCTAsync])
def test_ranks_with_numbers_of_numpy_describe_thresholds_alike(make):
    """Ranks compare the lines: a rank that reads its settings from an array is as good as the others."""
    assert make(lifespan=np.int64(50), drain=np.int32(7)).describe() == make(lifespan=50, drain=7).describe()
    for name in ("lifespan", "drain"):
        with pytest.raises(TypeError, match=rf"{name} must be an integer of at least 1, got 2\.5 of type float"):
            make(**{name: 2.5})


def test_descriptions_have_each_setting_once():
    """The density and the warm-up are one schedule; `dense` has a line for each name.

    A function as weight_decay has no text that ranks could compare.
    """
    lines = Settings.dgc(None, density=0.01, warmup=100, weight_decay=lambda name, parameter: 0.0).describe()
    names = [line.partition(" = ")[0] for line in lines]
    arguments = set(inspect.signature(Settings.dgc).parameters) - {"parameters", "process_set"}
    assert sorted(names) == sorted(arguments - {"dense", "warmup", "weight_decay"} | {"hvd_sparse", "method"})
    assert "density = warm_up(final=0.01, steps=100, initial=0.25, factor=0.25, begin=0)" in lines
    assert "weight_decay = 0.1" in Settings.dgc(None, weight_decay=0.1).describe()
    lines = DGS(density=0.01, warmup=100).describe()
    names = [line.partition(" = ")[0] for line in lines]
    assert sorted(names) == sorted({field.name for field in fields(DGS)} - {"warmup", "dense"} | {"method"})
    assert "density = warm_up(final=0.01, steps=100, initial=0.25, factor=0.25, begin=0)" in lines


@pytest.mark.parametrize(
    "make", [partial(Settings.dgc, None), partial(Settings.micro, None), partial(Settings.dct, None), DGS]
)
def test_a_density_that_contradicts_the_warm_up_is_refused(make):
    warmup = WarmUp(0.002, 100)
    assert make(warmup=warmup).schedule == make(density=0.002, warmup=warmup).schedule == warmup
    with pytest.raises(
        ValueError, match=r"density \(or sparsity\) must be left out when warmup is a Schedule.*got density=0.05"
    ):
        make(density=0.05, warmup=warmup)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "ten", "", "1e300"])
def test_a_timeout_that_is_no_number_of_seconds_is_named(text):
    with pytest.raises(ValueError, match=f"HVD_SPARSE_TIMEOUT must be a number of seconds above 0.* got {text!r}"):
        timeout(text)


def test_a_timeout_of_the_environment_is_the_default_of_sessions_and_pipelines_too():
    script = """
        import inspect
        from hvd_sparse.model_parallel import hybrid, pipeline
        from hvd_sparse.parameter_server import session
        print(inspect.signature(session.Session).parameters["timeout"].default, pipeline.TIMEOUT, hybrid.START_TIMEOUT)
    """
    for text, expected in (("7.5", "7.5 7.5 7.5"), (None, "600.0 600.0 600.0")):
        environment = {name: value for name, value in os.environ.items() if name != "HVD_SPARSE_TIMEOUT"}
        environment |= {} if text is None else {"HVD_SPARSE_TIMEOUT": text}
        command = [sys.executable, "-c", textwrap.dedent(script)]
        assert subprocess.check_output(command, env=environment, text=True).strip() == expected


def test_a_timeout_in_seconds():
    assert (timeout("600"), timeout("0.5"), timeout("1e5")) == (600.0, 0.5, 1e5)
