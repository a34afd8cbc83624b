"""Threshold hints: a tensor keeps its hint, whichever other tensors take part in a step."""

import math

import horovod.torch as hvd
import pytest
from gradients import draw
from helpers import drive, make_parameters

from hvd_sparse.schedule import WarmUp
from hvd_sparse.threshold import ThresholdHint
from hvd_sparse.torch import Compression, bucket_ops

SHAPES = {"a": (40, 50), "b": (3000,), "c": (1000,), "d": (70, 70)}
STEPS = ("abcd", "abcd", "abd", "bcda", "ab", "cd", "abcd", "abc", "abcd")


@pytest.mark.parametrize("bucket_bytes", [1, 100_000], ids=["buckets of one", "one bucket"])
def test_a_missing_tensor_costs_no_hint(monkeypatch, bucket_bytes):
    parameters = make_parameters(SHAPES)
    compressor = Compression.dgc(
        parameters.items(),
        density=WarmUp(0.02, steps=3, initial=0.05, factor=0.2),
        min_numel=0,
        bucket_bytes=bucket_bytes,
    )
    oracle = {n: ThresholdHint() for n in map(math.prod, SHAPES.values())}  # all sizes differ: they name a tensor
    calls = []

    def compare(*lists, hints, layout, members, **options):
        """Do the operator's work; the hints must be those that the selections of the same tensors left."""
        before = [ThresholdHint(*row) for row in hints[members].tolist()]
        info, finite = operator(*lists, hints=hints, layout=layout, members=members, **options)
        sizes, ks = ([each[member] for member in members] for each in (layout.sizes, layout.ks))
        for n, k, hint, (threshold, passed) in zip(sizes, ks, before, info.tolist(), strict=True):
            assert hint.value(k) == oracle[n].value(k)
            oracle[n].update(k, threshold, int(passed))
            calls.append(hint.value(k) > 0.0)
        return info, finite

    operator = bucket_ops.accumulate_bucket
    monkeypatch.setattr(bucket_ops, "accumulate_bucket", compare)
    for step, names in enumerate(STEPS):
        gradients = draw(SHAPES, step, hvd.rank())
        drive(compressor, parameters, {name: gradients[name] for name in names})
    first, changed = len(SHAPES), 4  # no hints yet; none for another density
    assert len(calls) == sum(map(len, STEPS)) and calls.count(False) == first + changed
