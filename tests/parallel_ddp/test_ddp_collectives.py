"""Collectives over a process group: results equal NumPy's, for any sizes."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hvd_sparse.torch.collectives import distributed
from hvd_sparse.torch.collectives.distributed import DistributedCollectives

pytestmark = pytest.mark.rank_counts

SIZES = {
    "equal": lambda rank: 40,
    "padded": lambda rank: 100 - rank % 2,
    "far apart": lambda rank: 1000 if rank == 0 else 1,
    "nothing from some": lambda rank: 7 * (rank % 2),
    "nothing": lambda rank: 0,
}


def message_of(rank, size, seed=0):
    return np.random.default_rng([seed, rank]).integers(-(2**62), 2**62, size)


@pytest.mark.parametrize("sizes", SIZES)
def test_gathers(sizes):
    """Three under way at a time, waited for in another order."""
    collectives, size = DistributedCollectives(), SIZES[sizes]
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    handles = [
        collectives.allgather_varying("", torch.from_numpy(message_of(rank, size(rank), seed))) for seed in range(3)
    ]
    for seed in (1, 0, 2):
        expected = np.concatenate([message_of(other, size(other), seed) for other in ranks])
        np.testing.assert_array_equal(handles[seed].wait(), expected)
        assert handles[seed].is_done()


def test_gathers_of_one_size_and_sums():
    collectives, ranks, rank = DistributedCollectives(), range(dist.get_world_size()), dist.get_rank()
    gathered = collectives.allgather("", torch.full((2, 3), float(rank)))
    added = torch.full((5,), rank + 1.0, dtype=torch.float64)
    total = collectives.allreduce("", added)
    assert gathered.wait().tolist() == [[float(other)] * 3 for other in ranks for _ in range(2)]
    assert total.wait() is added and added.tolist() == [sum(other + 1.0 for other in ranks)] * 5


@pytest.mark.parametrize("is_known", [False, True])
def test_all_to_all(is_known):
    collectives, ranks, rank = DistributedCollectives(), dist.get_world_size(), dist.get_rank()

    def part(source, target):
        return np.full(3 if is_known else (source + 2 * target) % 3, 10 * source + target)

    own = [part(rank, target) for target in range(ranks)]
    sizes = [len(one) for one in own]
    handle = collectives.alltoall("", torch.from_numpy(np.concatenate(own)), sizes, 3 if is_known else None)
    expected = np.concatenate([part(source, rank) for source in range(ranks)])
    np.testing.assert_array_equal(handle.wait(), expected)


def test_what_is_not_far_apart_is_padded_and_gathered_at_once(monkeypatch):
    """Otherwise each rank broadcasts its own, so that one that sends much does not make all of them send as much."""
    collectives, rank, ranks = DistributedCollectives(), dist.get_rank(), dist.get_world_size()
    calls = []
    for name in ("all_gather", "broadcast"):
        original = getattr(dist, name)
        monkeypatch.setattr(
            distributed.dist,
            name,
            lambda *arguments, name=name, original=original, **options: (
                calls.append(name) or original(*arguments, **options)
            ),
        )
    for sizes in ("padded", "far apart"):
        collectives.allgather_varying("", torch.zeros(SIZES[sizes](rank))).wait()
    broadcasts = ["broadcast"] * ranks if ranks > 1 else ["all_gather"]
    assert calls == ["all_gather"] * 3 + broadcasts


def test_subsets_are_made_once():
    from hvd_sparse.hierarchy import by_size

    collectives, rank = DistributedCollectives(), dist.get_rank()
    hierarchy = by_size(2, dist.get_world_size())
    first, second = collectives.subsets(hierarchy), collectives.subsets(hierarchy)
    assert set(first) == {one for one in (*hierarchy.hosts, *hierarchy.columns) if rank in one}
    for ranks, found in first.items():
        assert found.group is second[ranks].group
        assert (found.size(), found.rank()) == (len(ranks), ranks.index(rank))
    assert collectives.allgather_object(("host", rank)) == [("host", other) for other in range(dist.get_world_size())]
