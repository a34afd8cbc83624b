"""Hypothesis strategies for matrices of every awkward kind, for the functions on rows in all frameworks."""

import ml_dtypes
import numpy as np
import torch
from drawn import WIDTHS, vectors
from hypothesis import strategies as st
from kinds import MAKERS

from hvd_sparse import reference

DTYPES = st.sampled_from(sorted(WIDTHS))
SHAPES = st.one_of(
    st.tuples(st.integers(0, 5), st.integers(1, 70)),
    st.sampled_from([(1, 1), (0, 1), (1, 4097), (3, 1023), (40, 1), (2, 33_000)]),
)
WIDE_SEEDS = st.integers(-(2**63), 2**64 - 1)
DENSITIES = st.one_of(st.sampled_from([1.0, 0.5, 0.05, 1e-3, 5e-324]), st.floats(0, 1, exclude_min=True))


def as_array(tensor):
    """Return the same bits as a NumPy array. bfloat16 becomes ml_dtypes' type."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@st.composite
def matrices(draw, dtype=None, shapes=SHAPES):
    """Draw a torch tensor [B, f]. In some, each row has a different scale, or rows are all zero or all NaN."""
    shape, dtype = draw(shapes), draw(DTYPES) if dtype is None else dtype
    values = draw(vectors(max(1, shape[0] * shape[1]), dtype))[: shape[0] * shape[1]].reshape(shape)
    if shape[0] > 0 and draw(st.booleans()):
        scales = draw(st.lists(st.sampled_from([0.0, 1.0, 1e-3, 1e4, float("nan")]), min_size=1, max_size=5))
        values = values * torch.tensor(np.resize(scales, (shape[0], 1))).to(values.dtype)
    return values


def every_kind(shape, dtype):
    """Yield one matrix of each kind, with the kind's name."""
    for kind, maker in MAKERS.items():
        values = maker(shape[0] * shape[1], np.random.default_rng(shape[1]))
        yield kind, torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype)).reshape(shape)


def row_counts(columns):
    """Draw a number of a row's columns: few, most, or all."""
    return st.one_of(st.integers(1, columns), st.sampled_from(sorted({1, (columns + 19) // 20, columns})))


@st.composite
def bars(draw, values):
    """Draw thresholds of a matrix: one for each row, or one for all; often the magnitude of an element."""
    magnitude = reference.magnitudes(as_array(values))
    there = magnitude[~np.isnan(magnitude)][:50].tolist() or [0.0]
    one = st.one_of(st.sampled_from([0.0, -0.0, 5e-324, 1.0, 1e300, np.inf, *there]), st.floats(0, 1e40))
    count = draw(st.sampled_from([1, values.shape[0]]))
    drawn = draw(st.lists(one, min_size=1, max_size=5))
    return np.resize(np.array(drawn, np.float64), count)
