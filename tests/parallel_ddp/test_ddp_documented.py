"""Every script of the documentation that trains with DistributedDataParallel runs unchanged."""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import assert_ranks_agree, shared_folder
from documented import scripts_of

SCRIPTS = scripts_of("ddp")
PACKAGES = ("lightning", "accelerate", "transformers")  # which a script may need


def run(script, tmp_path, monkeypatch):
    """Run a script; return its names."""
    for package in PACKAGES:
        if f"import {package}" in SCRIPTS[script] or f"from {package}" in SCRIPTS[script]:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed: pip install -r requirements-ddp.txt, as make test-all does")
            if package != "lightning" and dist.get_world_size() == 1:
                pytest.skip(f"{package} wraps no model with one process")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)  # it exists already
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_, **__: None)  # and stays for the next
    monkeypatch.setenv("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(3, 16, 64, generator=generator)
    names = {"batches": [(one, (one[:, 0] > 0).long()) for one in inputs], "folder": shared_folder(tmp_path)}
    exec(compile(SCRIPTS[script], script, "exec"), names)
    return names


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_and_compresses(script, tmp_path, monkeypatch):
    names = run(script, tmp_path, monkeypatch)
    assert names["compression"].stats()["steps"] == 3
    assert_ranks_agree(names["model"])


def test_accelerate_restores_the_residuals_of_all_ranks(tmp_path, monkeypatch):
    (script,) = [name for name, code in SCRIPTS.items() if "accelerator.save_state(" in code]
    names = run(script, tmp_path, monkeypatch)
    before = names["compression"].state_dict(summed=True)
    names["compression"].reset()
    names["accelerator"].load_state(names["folder"])
    after = names["compression"].state_dict(summed=True)
    assert after["step"] == before["step"] == 3 and bool(before["memory"]["0.weight"]["residual"].any())
    for name, buffers in before["memory"].items():
        assert all(torch.equal(after["memory"][name][kind], buffer) for kind, buffer in buffers.items())
