"""The sums of a vote tell whether all ranks are at the same step, and those of presence whether all are there."""

import random
import types

import pytest

from hvd_sparse.reduce_scatter import must_balance
from hvd_sparse.torch.exchange import Pending
from hvd_sparse.torch.presence import Presence
from hvd_sparse.torch.vote import RanksDiffer, checked_sums, vote_of
from hvd_sparse.units import Units

RANKS = [2, 3, 7, 64, 99, 125, 250, 500, 1000, 1023, 4095, 65_535]


def sums_of(ranks, steps):
    """Return the sums over ranks as an exact all-reduce gives them; steps: {step: number of ranks at it}."""
    columns = zip(*(vote_of(0, 0, step, 1.0)[:-1] for step in steps), strict=True)
    sums = [sum(int(one) * count for one, count in zip(column, steps.values(), strict=True)) for column in columns]
    assert sum(steps.values()) == ranks and max(sums) < 2**53
    return list(map(float, sums))


def refuse():
    raise AssertionError("no payload was damaged")


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_at_one_step_agree_at_any_step(ranks):
    drawn = random.Random(ranks)
    steps = [0, 1, 92_777, 759_259, 958_671, 2**20 - 1, 2**20, 10**9, *(drawn.randrange(2**21) for _ in range(3_000))]
    for step in steps:
        sums = checked_sums(sums_of(ranks, {step: ranks}), step, Units(ranks, 1.0, 1.0), refuse)
        assert (sums.bad, sums.damaged, sums.loss_scale, sums.seconds) == (0.0, 0.0, ranks, None)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_at_another_step_is_noticed(ranks):
    for step in (1, 1000, 759_259):
        with pytest.raises(RanksDiffer, match=f"this rank is at step {step}"):
            checked_sums(sums_of(ranks, {step: ranks - 1, step + 1: 1}), step, Units(ranks, 1.0, 1.0), refuse)


@pytest.mark.parametrize("ranks", RANKS)
def test_equal_regions_need_no_agreement(ranks):
    for digest in (0, 1, 40_009, 65_521, 65_535):
        assert not must_balance([0.0, float(digest * ranks), float(digest * digest * ranks)], ranks)
        assert must_balance([0.0, float(digest * ranks + 1), float(digest * digest * ranks + 2 * digest + 1)], ranks)


class SumOfEqualRanks:
    """The exchange of a rank whose sums are those of `ranks` ranks that all do the same."""

    def __init__(self, ranks):
        self.ranks, self.collectives = ranks, types.SimpleNamespace(may_join=True)

    def end_announcement(self):
        pass

    def ask_presence(self, own):
        return Pending(finish=lambda: own * self.ranks)


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("ranks", [*RANKS, 4096, 5000])
def test_all_ranks_are_present(ranks, freezes):
    presence = Presence(SumOfEqualRanks(ranks), freezes)
    presence.check(ranks)
    assert presence.anywhere_frozen() == freezes
    with pytest.raises(RuntimeError, match=rf"1 of {ranks + 1} ranks have joined"):
        presence.check(ranks + 1)
