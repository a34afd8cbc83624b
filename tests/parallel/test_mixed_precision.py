"""The training loop of docs/mixed-precision.md, unchanged."""

import horovod.torch as hvd
import pytest
import torch
from documented import code_of
from helpers import assert_ranks_agree

LOOP = code_of("mixed-precision.md", 0)


def run_loop(loop, steps=12):
    """Run it on batches of this rank's own; return its names."""
    generator = torch.Generator().manual_seed(1 + hvd.rank())
    inputs = [torch.randn(16, 64, generator=generator) for _ in range(steps)]
    names = {"batches": [(one, (one[:, 0] > 0).long()) for one in inputs]}
    exec(compile(loop, "docs/mixed-precision.md", "exec"), names)
    return names


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
def test_the_documented_loop():
    """With a scaler at 65536 the model is, but for rounding in float16, that of the loop without a scaler."""
    decaying = LOOP.replace("1e-4 if", "0.5 if")  # strong: a scale that is not known would show
    assert decaying != LOOP
    scaled = run_loop(decaying)
    plain = run_loop(decaying.replace("GradScaler(device)", "GradScaler(device, enabled=False)"))
    assert scaled["scaler"].get_scale() == 65536.0 and plain["scaler"].get_scale() == 1.0
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    for before, expected, found in zip(
        start.parameters(), plain["model"].parameters(), scaled["model"].parameters(), strict=True
    ):
        moved = float((expected - before).detach().norm())
        assert moved > 0.0 and float((found - expected).detach().norm()) < 0.02 * moved
    assert_ranks_agree(dict(scaled["model"].named_parameters()))


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
def test_the_documented_loop_skips_what_overflows():
    """From a scale that is far too high it comes down, on all ranks alike, and learns."""
    names = run_loop(LOOP.replace("GradScaler(device)", "GradScaler(device, init_scale=2.0**24)"), steps=60)
    assert 1.0 <= names["scaler"].get_scale() < 2.0**24
    assert 1.0 < names["compression"].loss_scale <= 2.0**24
    assert float(names["loss"].detach()) < 0.6  # 2.3 at first
    assert_ranks_agree(dict(names["model"].named_parameters()))


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
def test_the_loop_without_its_loss_scale_is_an_error():
    """Nothing but the scaler's step shows it: gradients are reduced before."""
    forgotten = LOOP.replace("compression.loss_scale = scaler\n", "")
    assert forgotten != LOOP
    with pytest.raises(RuntimeError, match=r"before training: compression\.loss_scale = scaler"):
        run_loop(forgotten)
    run_loop(forgotten.replace("GradScaler(device)", "GradScaler(device, enabled=False)"), steps=2)


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
def test_a_loss_scale_that_is_not_kept_up_to_date_is_an_error():
    """The scale grows after two steps."""
    growing = LOOP.replace("GradScaler(device)", "GradScaler(device, init_scale=8.0, growth_interval=2)")
    run_loop(growing, steps=5)
    once = growing.replace("loss_scale = scaler\n", "loss_scale = scaler.get_scale()\n")
    assert once != growing
    run_loop(once, steps=2)
    with pytest.raises(RuntimeError, match=r"multiplied the gradients by 16\.0, but compression\.loss_scale was 8\.0"):
        run_loop(once, steps=3)
