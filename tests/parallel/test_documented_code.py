"""Every script of the documentation that trains with PyTorch and Horovod runs unchanged."""

import horovod.torch as hvd
import pytest
import torch
from documented import scripts_of
from helpers import assert_ranks_agree

SCRIPTS = scripts_of("torch")


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
@pytest.mark.parametrize("script", SCRIPTS)
def test_runs_and_compresses(script, tmp_path):
    generator = torch.Generator().manual_seed(hvd.rank())
    inputs = torch.randn(3, 16, 64, generator=generator)
    names = {"batches": [(one, (one[:, 0] > 0).long()) for one in inputs], "folder": tmp_path}
    exec(compile(SCRIPTS[script], script, "exec"), names)
    compression = names.get("compression") or names["module"].compression
    model = names.get("model") or names["module"]
    assert compression.stats()["steps"] > 0 or script == "cuda.md:0"
    if "broadcast_parameters" in SCRIPTS[script] or "manual_seed(0)" in SCRIPTS[script]:
        assert_ranks_agree(dict(model.named_parameters()))
