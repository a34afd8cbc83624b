"""Payloads added to what is there: in rank order, rounded as a sum from zeros is; nothing else changes."""

import numpy as np
import pytest
import torch

from hvd_sparse import reference
from hvd_sparse.torch import ops


def payloads(n, k, form, ranks=3, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(ranks):
        indices = np.sort(rng.choice(n, k, replace=False)).astype(np.int64)
        values = rng.standard_normal(k).astype(np.float32)
        row = torch.full((ops.payload_size(n, k, *form) + 8,), 7, dtype=torch.uint8)
        ops.pack(torch.from_numpy(indices), torch.from_numpy(values), n, k, row[8:], *form)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("form", [("run_length", "float32"), ("elias_fano", "float16"), ("bitmap", "bfloat16")])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1000, 10), (65_537, 700), (200_000, 2000)])
def test_it_adds_in_rank_order(n, k, form):
    gathered, out = payloads(n, k, form), torch.randn(n, generator=torch.Generator().manual_seed(1))
    expected, scale = out.numpy().copy(), np.float32(1 / 3)
    for row in gathered.numpy():
        indices, values = reference.unpack(row[8:], n, k, *form)
        expected[indices] += scale * values.astype(np.float32)
    ops.add_payloads(gathered, 8, n, k, out, 1 / 3, *form)
    assert out.numpy().tobytes() == expected.tobytes()


def test_damage_is_refused_before_anything_is_added():
    gathered, out = payloads(1000, 10, ("run_length", "float32")), torch.ones(1000)
    gathered[2, 60] ^= 1
    with pytest.raises(ValueError, match=r"hvd_sparse\.add_payloads: from rank 2: payload checksum"):
        ops.add_payloads(gathered, 8, 1000, 10, out)
    assert bool((out == 1.0).all())


def test_wrong_arguments_are_named():
    gathered = payloads(1000, 10, ("run_length", "float32"))
    with pytest.raises(ValueError, match="add_payloads: out must have 1000 elements, got 999"):
        ops.add_payloads(gathered, 8, 1000, 10, torch.ones(999))
    with pytest.raises(ValueError, match="add_payloads: gathered must be"):
        ops.add_payloads(gathered, 9, 1000, 10, torch.ones(1000))


def test_opcheck():
    gathered = payloads(1000, 10, ("run_length", "float32"))
    arguments = (gathered, 8, 1000, 10, torch.ones(1000), 1.0, "run_length", "float32", None)
    torch.library.opcheck(torch.ops.hvd_sparse.add_payloads, arguments)
