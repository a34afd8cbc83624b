"""Every script of the documentation that trains with DistributedDataParallel runs unchanged."""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import assert_ranks_agree
from documented import scripts_of

SCRIPTS = scripts_of("ddp")
PACKAGES = ("lightning", "accelerate")  # which a script may need


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_and_compresses(script, tmp_path, monkeypatch):
    for package in PACKAGES:
        if f"import {package}" in SCRIPTS[script] or f"from {package}" in SCRIPTS[script]:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed: pip install -r requirements-ddp.txt, as make test-all does")
            if package == "accelerate" and dist.get_world_size() == 1:
                pytest.skip("Accelerate wraps no model with one process")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)  # it exists already
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_, **__: None)  # and stays for the next
    monkeypatch.setenv("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(3, 16, 64, generator=generator)
    names = {"batches": [(one, (one[:, 0] > 0).long()) for one in inputs], "folder": str(tmp_path)}
    exec(compile(SCRIPTS[script], script, "exec"), names)
    assert names["compression"].stats()["steps"] == 3
    assert_ranks_agree(names["model"])
