"""Schedules: the paper's stages, even division, and errors with the remedy."""

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_sparse.schedule import Constant, Schedule, Stages, WarmUp, make_schedule


def test_paper_stages():
    """DGC, section 3.3: sparsity 75, 93.75, 98.4375, 99.6 %, then 99.9 %."""
    schedule = WarmUp(0.001, 400)
    densities = [schedule.density(step) for step in range(402)]
    assert densities[:100] == [0.25] * 100
    assert densities[100:200] == [0.0625] * 100
    assert densities[200:300] == [0.015625] * 100
    assert densities[300:400] == [0.00390625] * 100
    assert densities[400:] == [0.001] * 2


@pytest.mark.parametrize(
    ("final", "stages"),
    [
        (0.00390625, [0.25, 0.0625, 0.015625]),  # exactly a stage: it is the final one
        (0.0038, [0.25, 0.0625, 0.015625]),  # 2.8 % under one: within the tolerance
        (0.0037, [0.25, 0.0625, 0.015625, 0.00390625]),  # 5.6 % under: not
        (0.01, [0.25, 0.0625, 0.015625]),
        (0.24, []),
        (0.25, []),
        (0.5, []),
        (1.0, []),
    ],
)
def test_stages_end_before_the_final_density(final, stages):
    schedule = WarmUp(final, len(stages) or 3)
    assert [schedule.density(step) for step in range(len(stages))] == stages
    assert schedule.density(len(stages)) == final
    assert schedule.density(10**9) == final


def test_stages_share_the_steps_evenly_when_they_do_not_divide():
    schedule = WarmUp(0.001, 10)
    lengths = [[schedule.density(step) for step in range(10)].count(0.25 * 0.25**i) for i in range(4)]
    assert sum(lengths) == 10
    assert set(lengths) == {2, 3}


def test_one_step_of_warm_up():
    assert [WarmUp(0.001, 1).density(step) for step in range(3)] == [0.25, 0.001, 0.001]


def test_other_factor_and_start():
    schedule = WarmUp(0.01, 6, initial=1.0, factor=0.1)
    assert [schedule.density(step) for step in (0, 2, 3, 5, 6)] == [1.0, 1.0, 0.1, 0.1, 0.01]


def test_a_warm_up_that_begins_later_is_dense_before():
    """As PowerSGD's `start_powerSGD_iter` and PaddlePaddle's `rampup_begin_step`."""
    later, plain = WarmUp(0.001, 8, begin=5), WarmUp(0.001, 8)
    assert [later.density(step) for step in range(5)] == [1.0] * 5
    assert [later.density(5 + step) for step in range(12)] == [plain.density(step) for step in range(12)]
    assert (later.highest, plain.highest) == (1.0, 0.25)
    assert (later.settled, later.planned, plain.planned) == (0.001, 0.001, 0.001)
    assert later.describe() != plain.describe()


def test_densities_one_by_one():
    """PaddlePaddle's `sparsity=[0.75, 0.9, 0.99]` with `rampup_begin_step=2, rampup_step=4`."""
    schedule = Stages([0.25, 0.1, 0.01], steps=4, begin=2)
    assert [schedule.density(step) for step in range(8)] == [1.0, 1.0, 0.25, 0.25, 0.1, 0.1, 0.01, 0.01]
    assert (schedule.highest, schedule.settled, schedule.planned) == (1.0, 0.01, 0.01)
    assert (Stages([0.1, 0.25], 3).highest, Stages([0.1, 0.25], 3).settled) == (0.25, 0.25)
    assert [Stages([0.5], 3).density(step) for step in (0, 2, 3)] == [0.5] * 3
    assert Stages((0.25, 0.01), 4).describe() == Stages([0.25, 0.01], np.int64(4)).describe()
    different = [Stages([0.25, 0.01], 4), Stages([0.25, 0.01], 5), Stages([0.2, 0.01], 4), Stages([0.25, 0.01], 4, 1)]
    assert len({one.describe() for one in different}) == 4


@pytest.mark.parametrize("densities", [[], (), "0.1", 0.1, None])
def test_densities_in_another_form(densities):
    with pytest.raises(ValueError, match=r"densities must be a list of numbers, such as \[0.25, .*; got"):
        Stages(densities, 3)


def test_what_stages_refuse():
    with pytest.raises(ValueError, match=r"^densities\[1\] must be in \(0, 1\], got 2"):
        Stages([0.1, 2], 3)
    with pytest.raises(ValueError, match="begin must be an integer of at least 0, got -1"):
        Stages([0.1], 3, begin=-1)
    with pytest.raises(ValueError, match="begin must be an integer of at least 0, got -1"):
        WarmUp(0.1, 3, begin=-1)
    with pytest.raises(ValueError, match="steps must be an integer of at least 1, got 0"):
        Stages([0.1], 0)


@given(st.floats(1e-6, 1), st.integers(1, 2000), st.floats(0.01, 1), st.floats(0.05, 0.99))
@settings(deadline=None)
def test_density_never_rises_and_ends_at_final(final, steps, initial, factor):
    schedule = WarmUp(final, steps, initial, factor)
    marks = sorted({0, 1, steps // 3, steps // 2, steps - 1, steps, steps + 1})
    densities = [schedule.density(mark) for mark in marks]
    assert all(before >= after for before, after in itertools.pairwise(densities))
    assert densities[-1] == final
    assert all(density == final or final * 1.05 < density <= initial for density in densities)
    expected = initial if initial > final * 1.05 else final
    assert densities[0] == expected
    stages = schedule.stages
    assert not stages or stages[-1] * factor <= final * 1.05 * (1 + 1e-12)  # no stage is missing


def test_constant():
    assert [Constant(0.01).density(step) for step in (0, 1, 10**12)] == [0.01] * 3


@pytest.mark.parametrize("schedule", [Constant(0.01), WarmUp(0.001, 100), WarmUp(0.001, 9, begin=9), Stages([0.1], 5)])
def test_negative_step(schedule):
    with pytest.raises(ValueError, match="step must be an integer of at least 0, got -1"):
        schedule.density(-1)


def test_make_schedule():
    own = WarmUp(0.01, 7, initial=0.5)
    assert make_schedule(0.01) == make_schedule(0.01, 0) == Constant(0.01)
    assert make_schedule(0.01, 5) == WarmUp(0.01, 5)
    assert make_schedule(0.01, np.int64(5)) == WarmUp(0.01, 5)
    assert make_schedule(0.01, own) is own
    assert make_schedule(own) is own
    assert make_schedule(1) == Constant(1.0)
    assert isinstance(own, Schedule)


@pytest.mark.parametrize("density", [0, -0.5, 1.5, math.nan, math.inf, np.float32(2)])
@pytest.mark.parametrize(
    ("name", "make"),
    [("value", Constant), ("final", lambda density: WarmUp(density, 3)), ("density", make_schedule)],
)
def test_density_out_of_range(name, make, density):
    with pytest.raises(ValueError, match=rf"^{name} must be in \(0, 1\], got"):
        make(density)


@pytest.mark.parametrize("density", [True, "0.1", None, [0.1]])
def test_density_of_another_type(density):
    with pytest.raises(TypeError, match="density must be a number"):
        make_schedule(density)


@pytest.mark.parametrize("warmup", [True, False, 3.0, "4", [4]])
def test_warmup_of_another_type(warmup):
    with pytest.raises(TypeError, match=r"warmup .* must be an integer of at least 0, got .* of type"):
        make_schedule(0.01, warmup)


def test_refusals_say_what_to_do():
    with pytest.raises(ValueError, match=r"warmup .* must be an integer of at least 0, got -1"):
        make_schedule(0.01, -1)
    with pytest.raises(ValueError, match="warmup must be None when density is a Schedule"):
        make_schedule(Constant(0.1), 5)
    with pytest.raises(ValueError, match="steps must be an integer of at least 1, got 0"):
        WarmUp(0.01, 0)
    with pytest.raises(TypeError, match=r"steps must be an integer of at least 1, got 2\.5 of type float"):
        WarmUp(0.01, 2.5)
    with pytest.raises(ValueError, match=r"factor must be in \(0, 1\), got 1.0"):
        WarmUp(0.01, 5, factor=1.0)
    with pytest.raises(ValueError, match="initial must be in"):
        WarmUp(0.01, 5, initial=0.0)
    with pytest.raises(TypeError):
        Schedule()


def test_equal_settings_are_equal_hash_alike_and_describe_alike():
    pairs = [(Constant(0.5), Constant(np.float64(0.5))), (WarmUp(1, 4), WarmUp(1.0, np.int32(4)))]
    for one, other in pairs:
        assert one == other
        assert hash(one) == hash(other)
        assert one.describe() == other.describe()


def test_every_setting_shows_in_the_description():
    schedules = [
        Constant(0.01),
        Constant(0.010000000000000002),
        WarmUp(0.01, 5),
        WarmUp(0.02, 5),
        WarmUp(0.01, 6),
        WarmUp(0.01, 5, initial=0.3),
        WarmUp(0.01, 5, factor=0.5),
    ]
    assert len({schedule.describe() for schedule in schedules}) == len(set(schedules)) == len(schedules)


def test_schedules_are_frozen_and_travel():
    schedule = WarmUp(0.01, 5)
    with pytest.raises(AttributeError):
        schedule.final = 0.5
    assert pickle.loads(pickle.dumps(schedule)) == schedule
