"""Reduce-scatter among simulated ranks equals a transcription without payloads and messages."""

import itertools

import numpy as np
import pytest

from hvd_sparse.reduce_scatter import (
    BALANCE_STEPS,
    MessageFormat,
    Regions,
    SparseVector,
    add_in_order,
    known_bounds,
    must_balance,
    region_numbers,
    restored,
    state_of,
)

LOSSY = ("float16", "bfloat16", "int2", "int1")


def drawn(n, k, ranks, seed=0):
    """Return each rank's k largest of n: they cluster in the first tenth, as in a model whose layers differ."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(ranks):
        values = random.standard_normal(n).astype(np.float32)
        values[: n // 10] *= 4
        indices = np.sort(np.argpartition(-np.abs(values), k - 1)[:k])
        found.append(SparseVector(indices, values[indices]))
    return found


class Job:
    """All ranks of one message."""

    def __init__(self, n, k, ranks, **form):
        settings = {"coding": "run_length", "values": "float32", "level": "mean"} | form
        self.ranks = [Regions(MessageFormat(n, k, **settings), ranks, rank) for rank in range(ranks)]

    def agree(self, selected):
        counts = sum(rank.count(own) for rank, own in zip(self.ranks, selected, strict=True))
        for rank in self.ranks:
            rank.balance(counts)

    def send(self, selected):
        """Return what each rank sent, and the bytes that each received."""
        sent = [rank.split(own) for rank, own in zip(self.ranks, selected, strict=True)]
        parts = [np.split(one.message, np.cumsum(one.splits)[:-1]) for one in sent]
        return sent, [np.concatenate([part[owner] for part in parts]) for owner in range(len(self.ranks))]

    def run(self, selected, seed=3):
        """Return what each rank sent, what was kept, each owner's excess, and the bytes that each rank received."""
        sent, received = self.send(selected)
        reduced = [
            rank.reduce(own, one.padding, seed) for rank, own, one in zip(self.ranks, received, sent, strict=True)
        ]
        gathered = np.concatenate([payload for payload, _ in reduced])
        joined = [rank.join(gathered) for rank in self.ranks]
        for one in joined[1:]:
            assert all(map(np.array_equal, one, joined[0])), "ranks differ"
        own = [int(one.splits[rank]) for rank, one in enumerate(sent)]
        sizes = [
            mine.size - kept + gathered.size - payload.size
            for mine, kept, (payload, _) in zip(received, own, reduced, strict=True)
        ]
        return sent, joined[0], [excess for _, excess in reduced], sizes


def kept_sums(selected, bounds, most):
    """Return {index: sum} of what owners keep: float32 sums in rank order, the largest of each region."""
    sums = {}
    for own in selected:
        for index, value in zip(own.indices.tolist(), own.values, strict=True):
            sums[index] = np.float32(sums[index] + value) if index in sums else value
    kept = {}
    for begin, end in itertools.pairwise(bounds):
        here = sorted((index for index in sums if begin <= index < end), key=lambda index: -abs(sums[index]))
        kept |= {index: sums[index] for index in here[:most]}
    return kept


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 32, pytest.param(256, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("n", "k"), [(10_007, 100), (10_007, 1), (200_000, 2000), (3, 2), (70_000, 70_000)])
def test_owners_keep_the_largest_sums_of_their_regions(n, k, ranks):
    selected, job = drawn(n, k, ranks), Job(n, k, ranks)
    job.agree(selected)
    _, kept, excess, _ = job.run(selected)
    expected = kept_sums(selected, job.ranks[0].bounds, -(-k // ranks))
    assert dict(zip(kept.indices.tolist(), kept.values, strict=True)) == expected
    assert (np.diff(kept.indices) > 0).all()
    assert all(one.indices.size == 0 for one in excess)


@pytest.mark.parametrize("coding", ["run_length", "elias_fano", "bitmap", "auto"])
@pytest.mark.parametrize("values", LOSSY)
@pytest.mark.parametrize("segments", [None, [(0, 1), (1000, 64), (7777, 10)]])
@pytest.mark.each_value
def test_nothing_is_lost_to_rounding(segments, values, coding):
    """Over all ranks: what was selected = what was kept + what is left at the ranks and at the owners."""
    n, k, ranks = 10_007, 300, 4
    selected = drawn(n, k, ranks)
    job = Job(n, k, ranks, values=values, coding=coding, segments=segments, level="mean")
    job.agree(selected)
    sent, kept, excess, _ = job.run(selected)
    balance = np.zeros(n)
    for own, one in zip(selected, sent, strict=True):
        was_kept = np.isin(one.entries.indices, kept.indices)
        balance[one.entries.indices[was_kept]] += one.entries.values[was_kept]
        assert np.array_equal(own.indices, one.entries.indices)
    for one in excess:
        balance[one.indices] -= one.values
    balance[kept.indices] -= kept.values
    np.testing.assert_allclose(balance, 0, atol=2e-6 * np.abs(kept.values).max())
    assert any(one.indices.size for one in excess)


MANY = [pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (32, 64)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, *MANY])
def test_what_a_rank_receives_does_not_grow_with_the_ranks(ranks):
    n, k = 2_000_000, 20_000
    selected, job = drawn(n, k, ranks), Job(n, k, ranks)
    job.agree(selected)
    *_, sizes = job.run(selected)
    assert max(sizes) <= 2.1 * 6 * k * (ranks - 1) / ranks  # an all-gather: 6 * k * (ranks - 1)


def test_messages_have_one_size_while_selections_change():
    """Horovod negotiates a message again if its size changes."""
    n, k, ranks = 100_000, 1000, 8
    job, sizes = Job(n, k, ranks), set()
    job.agree(drawn(n, k, ranks))
    for seed in range(10):
        sent, _ = job.send(drawn(n, k, ranks, seed))
        sizes |= {one.message.size for one in sent}
    assert len(sizes) == 1


def test_regions_get_equal_shares_of_what_was_selected():
    n, k, ranks = 1_000_000, 10_000, 8
    selected, job = drawn(n, k, ranks), Job(n, k, ranks)
    job.agree(selected)
    counts = np.histogram(np.concatenate([own.indices for own in selected]), job.ranks[0].bounds)[0]
    assert counts.sum() == ranks * k
    assert np.abs(counts / k - 1).max() < 0.02
    assert np.diff(job.ranks[0].bounds).max() > 5 * np.diff(job.ranks[0].bounds).min(), "by entries, not by elements"


@pytest.mark.parametrize("position", [0, 8, 16, 24, 40])
def test_a_damaged_payload_names_its_rank(position):
    n, k, ranks = 10_007, 100, 3
    selected, job = drawn(n, k, ranks), Job(n, k, ranks)
    job.agree(selected)
    sent, received = job.send(selected)
    damaged = received[1].copy()
    damaged[position] ^= 1
    with pytest.raises(ValueError, match="from rank 0"):
        job.ranks[1].reduce(damaged, sent[1].padding, 0)
    with pytest.raises(ValueError, match="from rank 2"):
        job.ranks[1].reduce(received[1][:-8], sent[1].padding, 0)
    with pytest.raises(ValueError, match="payloads have"):
        job.ranks[1].reduce(np.append(received[1], np.zeros(8, np.uint8)), sent[1].padding, 0)


def test_sums_that_are_not_finite_leave_no_excess():
    big = np.array([3e38], np.float32)
    selected = [SparseVector(np.array([5]), big)] * 2
    job = Job(10, 1, 2, values="float16")
    job.agree(selected)
    with np.errstate(over="ignore"):
        *_, excess, _ = job.run(selected)
    assert all(np.isfinite(one.values).all() for one in excess)


def test_sums_are_made_in_the_order_of_the_ranks():
    parts = [SparseVector(np.array([4]), np.array([value], np.float32)) for value in (1e8, 1.0, -1e8)]
    assert add_in_order(parts).values.tolist() == [0.0]
    assert add_in_order([parts[0], parts[2], parts[1]]).values.tolist() == [1.0]


def test_ranks_agree_when_it_is_time_or_when_they_differ():
    one, other = np.array([0, 40, 100]), np.array([0, 41, 100])
    same, different = region_numbers({("a",): one}, 3), region_numbers({("a",): other}, 3)
    assert not must_balance(np.add(same, same), 2)
    assert must_balance(np.add(same, different), 2)
    assert must_balance(np.add(same, region_numbers({}, 3)), 2), "a rank that has joined"
    assert must_balance(np.add(same, region_numbers({("b",): one}, 3)), 2), "other tensors"
    assert must_balance(2 * np.array(region_numbers({("a",): one}, BALANCE_STEPS)), 2)


def test_regions_are_state():
    state = state_of({("a", "b"): np.array([0, 40, 100])})
    again = restored(state, {"a": 60, "b": 40})
    assert known_bounds(again, ["a", "b"], 100, 2).tolist() == [0, 40, 100]
    for names, n, ranks in ((["a"], 100, 2), (["a", "b"], 101, 2), (["a", "b"], 100, 3)):
        assert known_bounds(again, names, n, ranks) is None
    for sizes in ({"a": 60, "b": 41}, {"a": 60}, {}):
        assert restored(state, sizes) == {}
    assert restored([(["a"], [0, 70, 60, 100])], {"a": 100}) == {}
