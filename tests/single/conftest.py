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


@pytest.fixture
def join():
    """Return connect on this process alone, which closes the session before."""
    from hvd_sparse.torch.asynchronous import ASGD, connect

    sessions = []

    def connect_here(model, method=None, **options):
        if sessions:
            sessions[-1].close()
        options = {"servers": "colocated", "silence": None, "timeout": 20.0, **options}
        sessions.append(connect(model, method or ASGD(), **options))
        return sessions[-1]

    yield connect_here
    if sessions:
        sessions[-1].close()
