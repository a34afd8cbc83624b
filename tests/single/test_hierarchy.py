"""Hosts, columns and shards: pure functions of the ranks' hosts."""

import numpy as np
import pytest

from hvd_sparse import process_sets
from hvd_sparse.algorithms import Settings
from hvd_sparse.granularity import channels_of
from hvd_sparse.hierarchy import algorithm_between_hosts, by_name, by_size


def test_hosts_by_name():
    hierarchy = by_name(["a", "b", "a", "b", "b"])
    assert hierarchy.hosts == ((0, 2), (1, 3, 4))
    assert hierarchy.shards == 2
    assert hierarchy.columns == ((0, 1), (2, 3))
    assert hierarchy.host_of(4) == (1, 3, 4)
    assert [hierarchy.shard_of(rank) for rank in range(5)] == [0, 0, 1, 1, None]


@pytest.mark.parametrize(
    ("sizes", "ranks", "hosts"),
    [
        (2, 4, ((0, 1), (2, 3))),
        (2, 5, ((0, 1), (2, 3), (4,))),
        (8, 3, ((0, 1, 2),)),
        ([1, 3], 4, ((0,), (1, 2, 3))),
    ],
)
def test_hosts_by_size(sizes, ranks, hosts):
    assert by_size(sizes, ranks).hosts == hosts


@pytest.mark.parametrize("sizes", [[1, 2], [3, 2], []])
def test_sizes_that_do_not_add_up_are_refused(sizes):
    with pytest.raises(ValueError, match="must add up to the 4 ranks"):
        by_size(sizes, 4)


@pytest.mark.parametrize(("n", "row"), [(100, 1), (101, 1), (4, 1), (120, 10), (20, 10), (35, 5)])
def test_shards_cover_every_element_once(n, row):
    cut = by_size(4, 8).cut(n, row)
    assert cut[0] == 0
    assert cut[-1] == n
    assert (np.diff(cut) > 0).all()
    if n // row >= 4:
        assert (cut % row == 0).all(), "rows are not cut where there are enough"


def test_rows_are_kept_whole_where_channels_share_a_magnitude():
    by_channel, by_tensor = (Settings.dgc(None, granularity=one) for one in ("channel", "tensor"))
    assert channels_of((30, 20), by_channel) == 20
    assert channels_of((30, 20), by_tensor) == 1
    assert channels_of((30,), by_channel) == 1


def test_a_column_does_not_clip_again():
    algorithm = Settings.dgc(None, clip_norm=1.0, scope="model", clip_scope="model", exchange="hierarchical")
    inner = algorithm_between_hosts(algorithm, {"a": 0.5, "b": 0.0})
    assert (inner.clip_norm, inner.min_numel, inner.exchange, inner.weight_decay) == (None, 0, "auto", {"a": 0.5})
    assert algorithm_between_hosts(Settings.micro(None, exchange="hierarchical"), {}).exchange == "gather"


class Horovod:
    """What Horovod does with process sets: it sorts their ranks, and refuses a second one of the same ranks."""

    def __init__(self, monkeypatch):
        self.known = {}
        monkeypatch.setattr(process_sets.process_sets, "_basics", self)

    def size(self):
        return 4

    def _get_process_set_ids_and_ranks(self):
        return self.known

    def add_process_set(self, ranks):
        if sorted(ranks) in self.known.values():
            raise ValueError("duplicate")
        self.known[len(self.known) + 1] = sorted(ranks)
        return sorted(ranks)

    class ProcessSet:
        """Has the number that it is given."""

        def __init__(self, ranks):
            self.ranks = sorted(ranks)


def test_a_second_compressor_takes_the_process_sets_of_the_first(monkeypatch):
    """Of hosts whose ranks are not consecutive, too: a column is then not in the order of its ranks."""
    hierarchy, hvd = by_name("abba"), Horovod(monkeypatch)
    first = process_sets.process_sets_of(hvd, hierarchy)
    second = process_sets.process_sets_of(hvd, hierarchy)
    assert list(first) == list(second) == [(0, 3), (1, 2), (0, 1), (3, 2)]
    assert {ranks: one.process_set_id for ranks, one in second.items()} == dict(zip(first, (1, 2, 3, 4), strict=True))
