"""The coding of positions changes the bytes that are sent, and nothing else."""

import horovod.torch as hvd
import pytest
import torch
from gradients import whole_numbers
from helpers import drive, make_parameters, memory_of
from test_low_bit import METHODS

from hvd_sparse.algorithms import CODINGS
from hvd_sparse.torch import Compression

SHAPES = {"large": (300, 250), "middle": (40, 50), "small": (20,)}


@pytest.mark.parametrize("values", ["float32", "int2"])
@pytest.mark.parametrize("title", METHODS)
def test_every_coding_gives_the_same_sums_and_memories(title, values):
    found = {}
    for coding in CODINGS:
        parameters = make_parameters(SHAPES)
        settings = {**METHODS[title], "coding": coding, "values": values, "min_numel": 100}
        compression = getattr(Compression, title.split()[0])(parameters.items(), **settings)
        sums = [drive(compression, parameters, whole_numbers(SHAPES, t, hvd.rank())) for t in range(4)]
        kept = [memory_of(compression, parameters, name).clone() for name in SHAPES]
        found[coding] = [*(step[name].clone() for step in sums for name in SHAPES), *kept]
    for coding in CODINGS[1:]:
        for ours, theirs in zip(found[coding], found["run_length"], strict=True):
            assert torch.equal(ours, theirs), coding


@pytest.mark.parametrize(
    ("density", "ascending"),
    [
        (0.001, ["elias_fano", "run_length", "bitmap"]),
        (0.04, ["elias_fano", "run_length", "bitmap"]),
        (0.4, ["bitmap", "elias_fano", "run_length"]),
    ],
)
def test_the_smallest_is_chosen(density, ascending):
    sizes = {}
    for coding in CODINGS:
        parameters = make_parameters({"only": (100_000,)})
        compression = Compression.gradient_dropping(parameters.items(), density=density, coding=coding)
        drive(compression, parameters, whole_numbers({"only": (100_000,)}, 0, hvd.rank()))
        sizes[coding] = compression.stats()["step"]["payload_bytes"]
    assert sorted(ascending, key=sizes.get) == ascending
    assert sizes["auto"] == sizes[ascending[0]] < sizes[ascending[1]]
