"""`hvd_sparse plan --measure` under torchrun: the network of this job, the same on all ranks."""

import json

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import ALONE, everywhere

from hvd_sparse import plan
from hvd_sparse.job_network import ProcessGroups, measure_job

ARGUMENTS = ["--measure", "--parameters", "1e5", "--compute-ms", "5"]


@pytest.fixture(autouse=True)
def job(monkeypatch):
    """The job that is there, which stays."""
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


@ALONE
def test_the_first_rank_prints_the_network_of_all(capsys):
    plan.main([*ARGUMENTS, "--json"])
    printed = capsys.readouterr().out
    assert bool(printed) == (dist.get_rank() == 0)
    network, world_size, rank, framework = measure_job(None, "ddp")
    assert (world_size, rank, framework) == (dist.get_world_size(), dist.get_rank(), "torch")
    first, *others = everywhere(torch.tensor([network.bandwidth, network.latency, network.gather_cost]))
    assert all(torch.equal(first, one) for one in others) and 1e6 < network.bandwidth < 1e13
    if printed:
        found = json.loads(printed)
        assert found["ranks"] == world_size and found["host"] == "ddp" and found["network"]["bandwidth"] > 1e6


def test_its_collectives_are_those_of_horovod():
    groups, ranks = ProcessGroups(), dist.get_world_size()
    groups.allreduce(own := torch.ones(3), "name")
    assert own.tolist() == [ranks] * 3 and groups.broadcast_object([dist.get_rank()], 0, "name") == [0]
    groups.allgather(own, "name")


def test_a_lone_rank_has_no_network_to_measure(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(SystemExit, match="needs a job of several ranks: torchrun --no-python --nproc-per-node 2 h"):
        plan.main(ARGUMENTS)
