"""What a compressor under DistributedDataParallel reports, and the choice between payloads and dense by time."""

import pytest
import torch
import torch.distributed as dist
from ddp_helpers import Balance, Trainer, assert_ranks_agree
from gradients import SHAPES, draw

from hvd_sparse.torch import step as torch_step

BYTES_SHAPES = {"big": (120, 50), "middle": (2000,), "small": (64,)}
VOTE = 48  # bytes of a step's vote: 6 numbers


def test_each_step_is_reported_as_stats_tells_it():
    trainer, reports = Trainer(density=0.05, min_numel=100), []
    trainer.compression.log_to(lambda numbers, step: reports.append((step, numbers)), every=2, prefix="rank")
    for step in range(4):
        trainer.step(draw(SHAPES, step, dist.get_rank()))
        if step % 2:
            stats, (number, numbers) = trainer.compression.stats(), reports[-1]
            assert number == step + 1 == stats["steps"]
            told = {name: stats["step"][name] for name in ("ratio", "density", "payload_bytes", "received_bytes")}
            assert {name: numbers[f"rank/{name}"] for name in told} == told
            assert numbers["rank/residual_norm"] == stats["residual_norm"] > 0.0
    assert len(reports) == 2


def payload_by_hand(n, k):
    """Header, a count for the one block of up to 65,536 elements, runs, values; each aligned, the whole to 8 bytes."""
    values = -(-(32 + 2 + 2 * k) // 4) * 4
    return -(-(values + 4 * k) // 8) * 8


@pytest.mark.rank_counts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", ["tensor", "model", "dense"])
def test_bytes_by_hand(case, dtype):
    """DDP needs no tokens and no presence check. The first step gathers payloads, the others sum rows of them."""
    ranks, item = dist.get_world_size(), dtype.itemsize
    n, wide = 6000 + 2000 + 64, max(4, item)  # the small tensor is sent as float32 at least
    settings = {"density": 1.0} if case == "dense" else {"density": 0.01, "min_numel": 100, "scope": case}
    gathered, reduced, density = {
        "tensor": (payload_by_hand(6000, 60) + payload_by_hand(2000, 20), 64 * wide + VOTE, (60 + 20 + 64) / n),
        "model": (payload_by_hand(8000, 80), 64 * wide + VOTE, (80 + 64) / n),
        "dense": (0, n * (4 if dtype == torch.bfloat16 else item) + VOTE, 1.0),
    }[case]
    trainer = Trainer(shapes=BYTES_SHAPES, dtype=dtype, **settings)
    sent = [gathered + reduced] + [ranks * gathered + reduced] * 3
    received = [(ranks - 1) * gathered + reduced, *sent[1:]]
    for step in range(4):
        trainer.step(draw(BYTES_SHAPES, step, dist.get_rank()))
        stats = trainer.compression.stats()
        assert stats["steps"] == step + 1
        for part, first in (("step", step), ("total", 0)):
            numbers, last = stats[part], step + 1
            assert numbers["dense_bytes"] == n * item * (last - first)
            assert numbers["payload_bytes"] == sum(sent[first:last])
            assert numbers["received_bytes"] == sum(received[first:last])
            assert numbers["ratio"] == pytest.approx(n * item * (last - first) / sum(sent[first:last]), rel=1e-12)
            assert numbers["density"] == pytest.approx(density, rel=1e-12)


@pytest.mark.skipif(dist.get_world_size() == 1, reason="on one rank nothing is sent")
@pytest.mark.parametrize("dense_wins", [False, True])
def test_all_ranks_take_what_is_faster_in_the_mean(monkeypatch, dense_wins):
    """Dense takes 4 seconds, payloads 3 or 6 in the mean, but on rank 0 the other way round; nothing is lost."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    clock, mean, first = [1.0], *((6.0, 2.0) if dense_wins else (3.0, 5.0))
    own = first if rank == 0 else (ranks * mean - first) / (ranks - 1)
    monkeypatch.setattr(torch_step, "perf_counter", lambda: clock[0])
    trainer = Trainer(density=0.05, min_numel=100, dense_fallback="measured")
    balance, ways = Balance(trainer), []
    for step in range(25):
        balance.deliver(trainer.step(balance.gradients(step)))
        told = trainer.compression.stats()["dense_fallback"]
        ways.append(told["is_dense"])
        clock[0] += 4.0 if told["is_dense"] else own
        assert_ranks_agree(trainer.model)
    balance.check()
    assert set(ways[:20]) == {False, True} and set(ways[-4:]) == {dense_wins}
    assert (told["payload_seconds"], told["dense_seconds"]) == (pytest.approx(mean), 4.0)
