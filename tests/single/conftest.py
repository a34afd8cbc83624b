"""Fixtures: values of every awkward kind, as torch tensors of any floating-point type."""

import functools

import numpy as np
import pytest
from kinds import MAKERS


@pytest.fixture(params=MAKERS)
def kind(request):
    """Every kind of values in turn."""
    return request.param


@pytest.fixture(scope="session")
def make():
    """Return make(kind, n, dtype="float32"): a torch tensor, the same for the same arguments. Do not write to it."""
    import torch

    @functools.lru_cache(maxsize=16)
    def make_values(kind, n, dtype="float32"):
        return torch.from_numpy(MAKERS[kind](n, np.random.default_rng(n))).to(getattr(torch, dtype))

    return make_values
