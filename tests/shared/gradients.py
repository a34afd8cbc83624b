"""Gradients that every rank can draw for every other rank, without a framework and without hvd_sparse.

A gradient depends only on (seed, step, rank, name), so each process can compute the gradients of all ranks.
`whole_numbers` draws gradients whose float32 sums are exact, so that tests of conservation can compare with ==.
"""

import functools
import zlib

import numpy as np

SHAPES = {"body.weight": (30, 20), "body.bias": (20,), "head.weight": (500,), "scale": ()}
SCOPES = ("tensor", "model")


def draw(shapes, step, rank, seed=0):
    """Return one rank's gradients at one step, {name: float64 array}: standard normal, exact in float32."""
    return {name: normal(shapes[name], seed, step, rank, name) for name in shapes}


@functools.lru_cache(maxsize=4096)
def normal(shape, seed, step, rank, name):
    """Return the array of `draw` for one name. Do not write to it."""
    return np.asarray(generator(seed, step, rank, name).standard_normal(shape, np.float32), np.float64)


def whole_numbers(shapes, step, rank, seed=0, most=50):
    """Return {name: float64 array} of whole numbers whose sums are exact in float32 (below 2**24)."""
    return {name: generator(seed, step, rank, name).integers(-most, most + 1, shapes[name]) * 1.0 for name in shapes}


def generator(seed, step, rank, name):
    return np.random.default_rng([seed, step, rank, zlib.crc32(name.encode())])


def shuffled(names, step, rank):
    """Return the names in an order that depends on the rank."""
    return list(np.random.default_rng([step, rank]).permutation(sorted(names)))
