"""Hierarchical exchange, the tests that `make test` also runs on two hosts of two ranks each."""

import math

import horovod.torch as hvd
import pytest
import torch
from gradients import SCOPES, SHAPES, draw
from helpers import assert_alive, assert_ranks_agree, drive, make_parameters
from test_hierarchical import Ledger

from hvd_sparse.torch import Compression

HOSTS = {"exchange": "hierarchical", "min_numel": 100, "dense_fallback": None}
RANKS_PER_HOST = {2: [1, 2], 4: [2]}.get(hvd.size(), [1])

pytestmark = [
    pytest.mark.skipif(hvd.size() == 1, reason="hosts need several ranks"),
    pytest.mark.each_value,
]


@pytest.mark.parametrize("per_host", RANKS_PER_HOST)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("between", ["gather", "reduce_scatter"])
def test_nothing_is_lost(between, scope, per_host):
    parameters = make_parameters()
    settings = {"scope": scope, "between_hosts": between, "ranks_per_host": per_host, **HOSTS}
    compressor = Compression.gradient_dropping(parameters.items(), 0.05, **settings)
    ledger = Ledger()
    ledger.run(compressor, parameters)
    ledger.check(compressor)
    assert len(compressor.state_dict()["memory"]["head.weight"]["residual"]) == 500 // per_host


@pytest.mark.parametrize("per_host", RANKS_PER_HOST)
@pytest.mark.parametrize("between", ["gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dgc", {"clip_norm": 9.0, "weight_decay": 0.05}),
        ("dgc", {"scope": "model", "clip_norm": 9.0, "clip_scope": "model"}),
        ("samomentum", {"weight_decay": 0.05}),
        ("topk", {}),
    ],
)
def test_a_loss_scale_changes_nothing_but_the_gradients(method, settings, between, per_host):
    """Powers of two are exact: gradients and error feedback equal those of a run without a scale, bit for bit."""
    found = []
    settings = {"density": 0.05, "between_hosts": between, "ranks_per_host": per_host, **settings, **HOSTS}
    for scales in ((1.0,), (65536.0, 4096.0, 4096.0, 2.0)):
        parameters = make_parameters()
        compressor = getattr(Compression, method)(parameters.items(), **settings)
        steps = []
        for t in range(9):
            compressor.loss_scale = scale = scales[t % len(scales)]
            gradients = {name: gradient * scale for name, gradient in draw(SHAPES, t, hvd.rank()).items()}
            reduced = drive(compressor, parameters, gradients)
            assert_ranks_agree(reduced)
            steps.append({name: result / scale for name, result in reduced.items()})
        found.append((steps, compressor.state_dict()["memory"]))
    (plain, kept), (scaled, kept_scaled) = found
    for one, other in zip(plain, scaled, strict=True):
        for name, shape in SHAPES.items():
            is_small = math.prod(shape) < 100  # an all-reduce of them may add in another order
            torch.testing.assert_close(other[name], one[name], rtol=1e-5 * is_small, atol=1e-5 * is_small)
    torch.testing.assert_close(kept_scaled, kept, rtol=0.0, atol=0.0)
    assert kept["head.weight"]["residual"].any()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("elastic job", 'does not work in elastic jobs: take "gather" or "reduce_scatter"'),
        ("process set", r"needs all ranks of the job: leave out process_set, got ranks \[0\]"),
    ],
)
def test_it_is_refused_where_the_ranks_are_not_those_of_the_job(where, message, monkeypatch):
    if where == "elastic job":
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    settings = {"process_set": hvd.add_process_set([0])} if where == "process set" else {}
    with pytest.raises(ValueError, match=message):
        Compression.gradient_dropping(make_parameters().items(), 0.05, **settings, **HOSTS)
    assert_alive()
