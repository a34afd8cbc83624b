"""A checkpoint file is the old one or the new one, whatever happens. Shares of a sum add up to it exactly."""

import os
import signal
import stat
import tracemalloc

import numpy as np
import pytest

from hvd_sparse import checkpoint
from hvd_sparse.checkpoint import atomic_file, share_of, with_names


def test_a_file_is_there_once_it_is_complete(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["state"]


def test_a_new_file_has_the_mode_of_any_other(tmp_path):
    with atomic_file(str(tmp_path / "state")) as file:
        file.write(b"new")
    (tmp_path / "other").write_bytes(b"")
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with pytest.raises(ArithmeticError), atomic_file(path) as file:
        file.write(b"half")
        raise ArithmeticError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["state"]


def test_a_writer_that_is_killed_leaves_what_was_there(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    pid = os.fork()
    if pid == 0:
        with atomic_file(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL and path.read_bytes() == b"old"


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "nowhere" / "state"):
        pass


SAVED = {"m/a/kernel": {"residual": 1}, "m/a/bias": {"residual": 2}, "m/b/kernel": {"residual": 3}}


@pytest.mark.parametrize("turned", [False, True])
def test_a_state_takes_the_names_of_a_model_whose_paths_begin_otherwise(turned):
    """In all of its parts, and in both directions: Keras 3 shortens names when a model is saved and loaded."""
    long, short = list(SAVED), [name.removeprefix("m/") for name in SAVED]
    own, names = (short, long) if turned else (long, short)
    memory = dict(zip(own, SAVED.values(), strict=True))
    state = {
        "version": 2,
        "memory": memory,
        "thresholds": {own[2]: [0.5], "model": [1.0]},
        "regions": [(own[:2], [0, 9])],
    }
    assert with_names(state, names) == {
        "version": 2,
        "memory": dict(zip(names, SAVED.values(), strict=True)),
        "thresholds": {names[2]: [0.5], "model": [1.0]},
        "regions": [(names[:2], [0, 9])],
    }


@pytest.mark.parametrize(
    "names",
    [
        list(SAVED),
        ["a/kernel", "a/bias"],
        ["a/kernel", "a/bias", "c/kernel"],
        ["a/kernel", "a/bias", "kernel"],  # is the end of two
        ["nm/a/kernel", "nm/a/bias", "nm/b/kernel"],  # another first part, and not the end of a path
    ],
)
def test_any_other_state_keeps_its_names(names):
    state = {"memory": SAVED, "thresholds": {}}
    assert with_names(state, names) is state
    for other in (None, [], {}, {"memory": None}):
        assert with_names(other, names) is other


RESNET = ["conv1.weight", "fc.bias", "layer1.0.conv1.weight", "module.conv1.weight"]


@pytest.mark.parametrize("front", ["module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("turned", [False, True])
def test_one_path_in_front_of_all_names_is_never_ambiguous(front, turned):
    """Of a model in DistributedDataParallel or torch.compile, though some names are the ends of others."""
    own, names = ([front + name for name in RESNET], RESNET) if turned else (RESNET, [front + name for name in RESNET])
    state = {"memory": {name: {"residual": place} for place, name in enumerate(own)}, "thresholds": {own[1]: [1.0]}}
    found = with_names(state, reversed(names), ".")
    assert found["memory"] == {name: {"residual": place} for place, name in enumerate(names)}
    assert found["thresholds"] == {names[1]: [1.0]}


@pytest.mark.parametrize(
    "names",
    [
        ["a.weight", "b.module.weight"],  # is the end of both
        ["modulea.weight", "moduleweight"],
        ["module.a.weight"],
        ["module.a.weight", "module.b.weight"],
    ],
)
def test_other_names_of_pytorch_stay(names):
    state = {"memory": {"a.weight": {}, "weight": {}}, "thresholds": {}}
    assert with_names(state, names, ".") is state


def test_parts_may_be_wrapped_apart():
    state = {"memory": {"body.weight": 1, "head.weight": 2}, "thresholds": {}}
    found = with_names(state, ["module.body.weight", "head.weight"], ".")
    assert found["memory"] == {"module.body.weight": 1, "head.weight": 2}


@pytest.mark.parametrize("place", [0, 1])
def test_a_share_takes_little_more_memory_than_itself(place, monkeypatch):
    monkeypatch.setattr(checkpoint, "SPAN", 1 << 14)
    total = np.ones(1 << 21, np.float32)
    tracemalloc.start()
    share_of(total, place, 3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * total.nbytes


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 64, 1000])
def test_shares_add_up_exactly(count, monkeypatch):
    """Of any float32: large, denormal, at the edge between two exponents; in several spans."""
    monkeypatch.setattr(checkpoint, "SPAN", 7001)
    bits = np.random.default_rng(count).integers(0, 2**32, 20_000, np.uint64).astype(np.uint32).view(np.float32)
    edges = np.float32([0.0, -0.0, 1e-45, -3e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38, 1.0, 0.99999994, 1e-30])
    total = np.concatenate([bits[np.isfinite(bits)], edges, np.nextafter(edges, np.float32(1.0))])
    shares = [share_of(total, place, count) for place in range(count)]
    assert all(share.dtype == np.float32 for share in shares)
    assert np.array_equal(sum(share.astype(np.float64) for share in shares), total.astype(np.float64))
    normal = np.abs(total) > 1e-37
    bound = np.abs(total[normal]) * 2.0**-23 * count
    assert (np.abs(shares[0] - total / count)[normal] <= bound).all()


def test_a_sum_that_grows_beyond_float32_stays_finite():
    total = np.float32([2e38, 1.0, -3e38])
    shares = [share_of(total, place, 4, 2.0) for place in range(4)]
    assert np.isfinite(shares).all()
    largest = float(np.finfo(np.float32).max)
    assert np.array_equal(sum(share.astype(np.float64) for share in shares), [largest, 2.0, -largest])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0], "rank 0"),
        ([63], "rank 63"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0 to 2"),
        (range(64), "ranks 0 to 63"),
        ([1, 3, 5, 6, 7], "ranks 1, 3, 5 to 7"),
        ([0, 2, 3, 9, 11, 12, 13], "ranks 0, 2, 3, 9 and 3 more"),
        (range(1, 4096, 2), "ranks 1, 3, 5 and 2045 more"),
    ],
)
def test_ranks_with_one_reason_are_named_together(ranks, text):
    reasons = ["too old" if rank in ranks else "" for rank in range(ranks[-1] + 2)]
    assert checkpoint.refusal(reasons) == f"{text}: too old"


def test_each_reason_is_given_once():
    reasons = ["", "too old", "too new", "too old", ""]
    assert checkpoint.refusal(reasons) == "ranks 1, 3: too old; rank 2: too new"
    assert checkpoint.refusal(["", ""]) == ""
