"""Fixtures: values of every awkward kind, jobs of several processes, modules of the examples, asynchronous sessions."""

import functools
import importlib
from pathlib import Path

import launching
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
def run_job(tmp_path, monkeypatch):
    """Return run(script, ranks, ...), see `launching.run_asynchronous_job`. A hang is a failure."""
    monkeypatch.setattr(launching, "LIMIT_SECONDS", 180)
    return functools.partial(launching.run_asynchronous_job, tmp_path)


@pytest.fixture
def load(monkeypatch):
    """Return load(name): import a module of the folder examples."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module


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
