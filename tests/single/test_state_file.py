"""A file of save_state has a state exactly, and runs nothing; a damaged or foreign one is refused by its path."""

import os
import pickle
import re
import zipfile

import numpy as np
import pytest
import torch
from identical import assert_identical

from hvd_sparse.checkpoint import load_state, save_state

RANDOM = np.random.default_rng(3)
RESIDUAL = RANDOM.integers(0, 2**32, 500, np.uint64).astype(np.uint32).view(np.float32)  # any bits: NaNs, denormals
STATE = {
    "version": 2,
    "method": "dgc",
    "step": 7,
    "ranks": 2,
    "rank": 0,
    "shard": None,
    "summed": False,
    "averages": True,
    "memory": {"d/kernel:0": {"residual": RESIDUAL, "velocity": -RESIDUAL}, "file": {}, "größe\0 'a'": {}},
    "thresholds": {"model": np.array([1.1, 2.0**-1074])},
    "regions": [(["d/kernel:0", "file"], [0, 250, 500])],
}
OTHERS = [
    None,
    {},
    [(), [], ((1,), {2: "two", "2": 2, None: (3, 4.0), (1, "a"): True})],
    [0.1, -0.0, float("nan"), float("-inf"), 2**100, -1, True, "", "\ud800"],
    [np.float64(0.1), np.float32(0.1), np.int64(5), np.bool_(True), np.str_("name"), np.complex64(1j)],
    [np.zeros(()), np.zeros((0, 3), np.float16), np.arange(6, dtype=">i2").reshape(2, 3).T, np.array(["a", "bc"])],
    np.arange(20.0).reshape(4, 5)[::2, 1::2],
]


@pytest.mark.parametrize("state", [STATE, *OTHERS], ids=str)
def test_a_state_is_the_one_that_was_saved(state, tmp_path):
    path = tmp_path / "state.of.a.rank"
    save_state(str(path), state)
    assert_identical(load_state(path), state)
    assert os.listdir(tmp_path) == [path.name]
    with np.load(path, allow_pickle=False) as file:  # all of it can be read without pickles
        assert all(array.dtype.kind != "O" for array in file.values())


class Run:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_is_no_part_of_a_state_is_refused_and_named(tmp_path):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    path = tmp_path / "state"
    path.write_bytes(b"old")
    for value, what in {
        "a tensor": (torch.zeros(3), "a Tensor"),
        "objects": (np.array([Run("")]), "an array of object"),
        "another library's dtype": (np.zeros(2, bfloat16), "an array of bfloat16"),
        "a masked array": (np.ma.zeros(2), "an array of float64"),
        "a set": ({1}, "a set"),
        "an object": (Run(""), "a Run"),
    }.values():
        with pytest.raises(TypeError, match=re.escape(f"state['memory'][1]['w'] is {what}: save_state writes")):
            save_state(path, {"memory": [0, {"w": value}]})
        assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["state"]


def save_foreign(kind, path):
    """Write a file that save_state has not written; those with an object make `path`.run when they are unpickled."""
    bad = Run(f"{path}.run")
    with open(path, "wb") as file:
        if kind == "pickle":
            pickle.dump(bad, file)
        elif kind == "torch":
            torch.save({"state": torch.zeros(2)}, file)
        elif kind == "npy":
            np.save(file, np.zeros(3))
        elif kind == "npz":
            np.savez(file, weights=np.zeros(3))
        elif kind == "objects":
            np.savez(file, state=np.array([bad]))
        elif kind == "object in an array":
            np.savez(file, state=np.array('{"array": "array.0"}'), **{"array.0": np.array([bad])})
        elif kind == "no array":
            np.savez(file, state=np.array('{"array": "array.0"}'))
        elif kind == "unknown":
            np.savez(file, state=np.array('{"call": "os.mkdir"}'))
        elif kind == "no JSON":
            np.savez(file, state=np.array("[1"))
        elif kind == "no text":
            np.savez(file, state=np.zeros(3))


KINDS = ("empty", "pickle", "torch", "npy", "npz", "objects", "object in an array", "no array", "unknown", "no JSON")


@pytest.mark.parametrize("kind", [*KINDS, "no text"])
def test_a_foreign_file_is_refused(kind, tmp_path):
    path = tmp_path / "state"
    save_foreign(kind, path)
    with pytest.raises(ValueError, match=rf"^{re.escape(repr(str(path)))} is damaged, or not a file of save_state: \w"):
        load_state(path)
    assert os.listdir(tmp_path) == ["state"]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "state")


def test_a_damaged_file_is_refused_or_has_the_state(tmp_path):
    """Cut anywhere, or one byte changed: a zip file has fields that do not matter, such as times."""
    path, refused = tmp_path / "state", 0
    save_state(path, STATE)
    whole = path.read_bytes()
    cuts = [whole[:place] for place in RANDOM.integers(0, len(whole), 40)]
    changed = [bytearray(whole) for _ in range(400)]
    for number, data in enumerate(changed):
        place = number * len(whole) // len(changed) if number % 2 else int(RANDOM.integers(len(whole)))
        data[place] ^= int(RANDOM.integers(1, 256))
    for data in [*cuts, *changed]:
        path.write_bytes(data)
        try:
            assert_identical(load_state(path), STATE)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 400


def test_changed_numbers_are_told_by_the_checksum(tmp_path):
    path = tmp_path / "state"
    save_state(path, STATE)
    with zipfile.ZipFile(path) as archive:
        begin = path.read_bytes().index(RESIDUAL.tobytes())
        assert len(archive.namelist()) == 4
    data = bytearray(path.read_bytes())
    data[begin] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"the checksum of its part array\.0\.npy is wrong"):
        load_state(path)
