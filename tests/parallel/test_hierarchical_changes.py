"""Hierarchical exchange: error feedback where Horovod is initialised again, with other hosts."""

import dataclasses
import functools

import horovod.torch as hvd
import pytest
import torch
from gradients import SHAPES, draw, whole_numbers
from helpers import assert_alive, drive, make_parameters
from test_hierarchical import Ledger, whole

from hvd_sparse.torch import Compression

pytestmark = [
    pytest.mark.rank_counts,
    pytest.mark.skipif(hvd.size() == 1, reason="hosts of several ranks need several ranks"),
]
CHANGES = pytest.mark.parametrize("layouts", [(hvd.size(), 1), (1, hvd.size())], ids=str)


def lay_out_anew(compressor, ranks_per_host):
    """Do what a new initialisation of Horovod does, with other hosts."""
    compressor._step.algorithm = dataclasses.replace(compressor.algorithm, ranks_per_host=ranks_per_host)
    compressor._step._laid_out_in = object()


@CHANGES
def test_nothing_is_lost_where_hosts_have_changed(layouts):
    parameters = make_parameters()
    exchange = {"exchange": "hierarchical", "ranks_per_host": layouts[0], "dense_fallback": None}
    compressor = Compression.gradient_dropping(parameters.items(), 0.05, min_numel=100, **exchange)
    ledger = Ledger()
    for t in range(8):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        if t == 4:
            lay_out_anew(compressor, layouts[1])
            ledger.check(compressor)
            del gradients["head.weight"]
        ledger.feed(gradients)
        ledger.receive(drive(compressor, parameters, gradients))
    ledger.check(compressor)


@CHANGES
def test_velocities_stay_where_hosts_have_changed(layouts):
    """Also that of a tensor with one element, which is not divided on a host of several ranks."""
    parameters = make_parameters()
    exchange = {"exchange": "hierarchical", "ranks_per_host": layouts[0], "dense_fallback": None}
    compressor = Compression.dgc(parameters.items(), 0.05, min_numel=0, **exchange)
    for t in range(3):
        drive(compressor, parameters, draw(SHAPES, t, hvd.rank()))
    before = {name: whole(compressor, name, "velocity") for name in SHAPES}
    lay_out_anew(compressor, layouts[1])
    for name in SHAPES:
        torch.testing.assert_close(whole(compressor, name, "velocity"), before[name], rtol=1e-6, atol=1e-6)
    assert before["head.weight"].any()


@pytest.mark.parametrize("loads", [True, False], ids=["loads", "resets"])
def test_a_loaded_state_replaces_all_error_feedback_where_hosts_have_changed(loads):
    make = functools.partial(Compression.dgc, density=0.05, min_numel=100, exchange="hierarchical", dense_fallback=None)
    parameters, others = make_parameters(), make_parameters()
    first = make(parameters.items(), ranks_per_host=hvd.size())
    for t in range(6):
        if t == 3:
            saved = first.state_dict(summed=True)
        drive(first, parameters, draw(SHAPES, t, hvd.rank()))
    lay_out_anew(first, 1)
    first.state_dict()
    second = make(others.items(), ranks_per_host=1)
    for one in (first, second):
        one.load_state_dict(saved) if loads else one.reset()
    for t in range(3, 7):
        gradients = draw(SHAPES, t, hvd.rank())
        found, wanted = (drive(one, own, gradients) for one, own in ((first, parameters), (second, others)))
        assert all(torch.equal(found[name], wanted[name]) for name in SHAPES)


def test_before_the_first_step_a_rank_reads_its_state_alone():
    make = functools.partial(Compression.dgc, density=0.05, min_numel=100, exchange="hierarchical", dense_fallback=None)
    parameters, others = make_parameters(), make_parameters()
    first, second = make(parameters.items(), ranks_per_host=1), make(others.items(), ranks_per_host=1)
    early = first.state_dict() if hvd.rank() == 0 else None  # to find the hosts would wait for the others,
    assert_alive()  # which do this meanwhile
    for t in range(3):
        drive(first, parameters, draw(SHAPES, t, hvd.rank()))
    first.load_state_dict(early or second.state_dict())
    for t in range(3):
        gradients = draw(SHAPES, t, hvd.rank())
        found, wanted = (drive(one, own, gradients) for one, own in ((first, parameters), (second, others)))
        assert all(torch.equal(found[name], wanted[name]) for name in SHAPES)
