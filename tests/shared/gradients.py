"""Gradients that every rank can draw for every other; no framework, nothing of hvd_sparse.

A gradient is a pure function of (seed, step, rank, name), so each process can work out what all of them did.
`whole_numbers` makes gradients whose float32 sums are exact: what must be conserved is then compared with ==.
"""

import functools
import zlib

import numpy as np

SHAPES = {"body.weight": (30, 20), "body.bias": (20,), "head.weight": (500,), "scale": ()}
SCOPES = ("tensor", "model")


def draw(shapes, step, rank, seed=0):
    """Return {name: float64 array}, standard normal, exact in float32: the gradients of one rank at one step."""
    return {name: normal(shapes[name], seed, step, rank, name) for name in shapes}


@functools.lru_cache(maxsize=4096)
def normal(shape, seed, step, rank, name):
    """Return what `draw` returns for one name. Do not write to it."""
    return np.asarray(generator(seed, step, rank, name).standard_normal(shape, np.float32), np.float64)


def whole_numbers(shapes, step, rank, seed=0, most=50):
    """Return {name: float64 array} of whole numbers: their sums are exact in float32 (below 2**24)."""
    return {name: generator(seed, step, rank, name).integers(-most, most + 1, shapes[name]) * 1.0 for name in shapes}


def generator(seed, step, rank, name):
    return np.random.default_rng([seed, step, rank, zlib.crc32(name.encode())])


def shuffled(names, step, rank):
    """Return the names in an order of this rank's own."""
    return list(np.random.default_rng([step, rank]).permutation(sorted(names)))
