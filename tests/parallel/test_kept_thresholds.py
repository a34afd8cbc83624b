"""Thresholds that decide what is sent are part of the state. DCT renews a threshold when the count leaves its band."""

import io
import itertools

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import draw
from helpers import assert_ranks_agree, drive, make_parameters
from turns import Ages, Alternating

from hvd_sparse.torch import Compression

SHAPES = {"body.weight": (60, 50), "head.weight": (2000,), "bias": (20,)}
METHODS = {
    "dct": {"lifespan": 50},
    "sidco": {"stages": 2},
    "micro": {},
    "micro, scaling": {"controller": "scaling"},
    "hard_threshold": {"value": 5.0},
}


def make(method, parameters, **settings):
    density = {} if method == "hard_threshold" else {"density": 0.01}
    return getattr(Compression, method.split(",")[0])(
        parameters.items(), min_numel=100, **density, **METHODS[method], **settings
    )


def run(compression, parameters, steps):
    return [drive(compression, parameters, draw(SHAPES, t, hvd.rank())) for t in steps]


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_is_the_uninterrupted_one(method):
    """Saved after 17 steps, amid a life-span and five steps of SIDCo; through a file, into a new compressor."""
    parameters = make_parameters(SHAPES)
    whole = make(method, parameters)
    run(whole, parameters, range(17))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    resumed = make(method, parameters)
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    expected, found = run(whole, parameters, range(17, 30)), run(resumed, parameters, range(17, 30))
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in SHAPES)
    assert resumed.stats()["step"]["density"] == whole.stats()["step"]["density"]


@pytest.mark.parametrize("method", ["dct", "sidco", "micro", "micro, scaling"])
def test_in_a_summed_state_thresholds_start_anew(method):
    parameters = make_parameters(SHAPES)
    compression = make(method, parameters)
    run(compression, parameters, range(12))
    own, summed = compression.state_dict(), compression.state_dict(summed=True)
    assert own["thresholds"] and not summed["thresholds"]
    compression.load_state_dict(summed)
    fresh = {name: numbers.tolist() for name, numbers in make(method, parameters).state_dict()["thresholds"].items()}
    assert {n: t.tolist() for n, t in compression.state_dict()["thresholds"].items()} == fresh
    run(compression, parameters, range(12, 14))


def test_thresholds_that_do_not_fit_are_refused():
    parameters = make_parameters(SHAPES)
    state = make("dct", parameters).state_dict()
    bad = {name: numbers.clone() for name, numbers in state["thresholds"].items()}
    bad["head.weight"][0] = np.nan
    with pytest.raises(ValueError, match=r"head\.weight: the state's threshold must be finite"):
        make("dct", parameters).load_state_dict({**state, "thresholds": bad})
    with pytest.raises(ValueError, match="other thresholds"):
        make("sidco", parameters).load_state_dict({key: part for key, part in state.items() if key != "method"})


def counts_after_jump(factor, **settings):
    """Sent elements of 2000 in each step; from step 20 on gradients are `factor` times as large, on the last rank."""
    shapes, counts = {"only": (2000,)}, []
    parameters = make_parameters(shapes)
    compression = Compression.dct(parameters.items(), density=0.01, lifespan=1000, min_numel=100, **settings)
    for t in range(40):
        scale = factor if t >= 20 and hvd.rank() == hvd.size() - 1 else 1.0
        drive(compression, parameters, {"only": draw(shapes, t, hvd.rank())["only"] * scale})
        counts.append(round(compression.stats()["step"]["density"] * 2000))
    return counts


@pytest.mark.parametrize("factor", [20.0, 0.05])
def test_a_jump_of_the_gradients_scale_brings_a_new_threshold(factor):
    """k is 20: the step after one that sent over 80, or under 5, has exactly 20 again. Without the band none has."""
    kept = counts_after_jump(factor, band=None)
    counts = counts_after_jump(factor)
    for before, after in itertools.pairwise(counts):
        assert 5 <= before <= 80 or after == 20, counts
    is_last = hvd.rank() == hvd.size() - 1
    if is_last and factor > 1.0:
        assert kept[20] > 1000 and counts[20] > 1000, "seen when it has happened"
        assert counts[21] == 20 and np.mean(kept[25:]) > 200
    assert 5 <= np.mean(counts[25:]) <= 60, counts


@pytest.mark.parametrize("kind", ["dense", "frozen", "absent", "all absent"])
def test_a_turn_in_a_step_that_does_not_use_the_threshold_is_made_up_for(kind):
    """No threshold is used for much longer than its 8 steps, though each tensor has its turns in such steps."""
    shapes = {"one": (2000,), "other": (1500,), "small": (20,)}
    parameters, ages = make_parameters(shapes), Ages()
    density = Alternating() if kind == "dense" else 0.01
    compression = Compression.dct(parameters.items(), density, lifespan=8, band=None, min_numel=100)
    for t in range(80):
        gradients = draw(shapes, t, hvd.rank())
        left_out = "one" if t % 2 else "other"
        if kind == "absent":
            del gradients[left_out]
        if kind == "all absent" and t % 2:
            gradients = {"small": gradients["small"]}
        for name, parameter in parameters.items():
            parameter.requires_grad_(kind != "frozen" or name != left_out)
        drive(compression, parameters, gradients)
        thresholds = compression.state_dict()["thresholds"]
        for name in ("one", "other"):
            ages.note(name, float(thresholds[name][0]))
    assert 6 <= ages.oldest <= 10


@pytest.mark.parametrize("band", [1.0, 0.0, float("inf"), "4"])
def test_a_band_is_above_one_or_none(band):
    with pytest.raises((ValueError, TypeError), match="band"):
        Compression.dct(make_parameters(SHAPES).items(), band=band)


def test_ranks_agree_while_thresholds_are_taken_early():
    parameters = make_parameters(SHAPES)
    compression = make("dct", parameters)
    for t in range(12):
        scale = 30.0 ** (t % 3 - hvd.rank() % 2)
        reduced = drive(compression, parameters, {n: g * scale for n, g in draw(SHAPES, t, hvd.rank()).items()})
        assert_ranks_agree(reduced)


def test_a_threshold_is_kept_where_fewer_than_k_residuals_are_nonzero():
    shapes = {"head": (2000,)}
    parameters = make_parameters(shapes)
    compression = Compression.dct(parameters.items(), density=0.01, lifespan=1000, min_numel=100)
    for t in range(10):
        head = draw(shapes, t, hvd.rank())["head"]
        head[4:] = 0.0
        drive(compression, parameters, {"head": head})
        assert round(compression.stats()["step"]["density"] * 2000) == 4
        (numbers,) = compression.state_dict()["thresholds"].values()
        assert numbers.tolist() == [2.0**-149, 20.0]
