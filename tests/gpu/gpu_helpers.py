"""Values of every awkward kind, and comparisons between devices. It does not use pytest, see run.py.

HVD_SPARSE_GPU_TESTS=small: fewer and smaller cases, for compute-sanitizer, under which kernels take up to 100 times as
long.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import SkipTest

import numpy as np
import torch
from kinds import MAKERS

from hvd_sparse.library import has_cuda
from hvd_sparse.torch import ops
from hvd_sparse.wire import LOW_BITS

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 240  # of a job
SMALL = os.environ.get("HVD_SPARSE_GPU_TESTS") == "small"
CAN_CAPTURE = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1"
CANNOT_CAPTURE = "a CUDA graph cannot contain allocations, and each tensor has memory of its own"
DTYPES = (torch.float32, torch.bfloat16) if SMALL else (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (1, 2, 257, 70_001) if SMALL else (1, 2, 31, 257, 4099, 65_535, 65_536, 65_537, 131_072, 3_000_001)
KINDS = ("normal", "ties", "nan") if SMALL else tuple(MAKERS)
CODINGS = ("run_length", "elias_fano", "bitmap", "auto")
VALUE_DTYPES = ("float32", "float64", "float16", "bfloat16", "none", "int2", "int1")


def reason_to_skip() -> str | None:
    """Say why nothing here can run, if so."""
    if not torch.cuda.is_available():
        return "there is no GPU, or PyTorch was built without CUDA"
    if not has_cuda("torch"):
        return "hvd_sparse was built without CUDA: make test-gpu builds it"
    return None


def need(condition: bool, reason: str) -> None:
    """Leave the test out, with the reason, unless the condition holds; pytest knows this exception, too."""
    if not condition:
        raise SkipTest(reason)


def make(kind: str, n: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """Draw values on the CPU, the same for the same arguments."""
    return torch.from_numpy(MAKERS[kind](n, np.random.default_rng([seed, n]))).to(dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor, context="") -> None:
    """Assert equal type, shape and bits; NaN only has to be in the same places. `found` is on the GPU."""
    assert found.is_cuda, context
    found, expected = found.cpu(), expected.cpu()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (context, found.shape, expected.shape)
    if found.dtype.is_floating_point:
        nan = found.isnan() & expected.isnan()
        found, expected = found.masked_fill(nan, 0.0), expected.masked_fill(nan, 0.0)
    same = (
        found.contiguous().view(torch.uint8) == expected.contiguous().view(torch.uint8)
        if found.dim()
        else found == expected
    )
    assert bool(same.all()), (context, f"{int((~same).sum())} of {same.numel()} differ", found, expected)


def assert_refuses(call, *arguments, says: str = "", **options) -> None:
    """Assert that `call` raises an error whose message contains `says`."""
    try:
        call(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        assert says in str(error), str(error)
        return
    raise AssertionError(f"{call} took it")


def run_horovod(script: str, what: str, ranks: int) -> list:
    """Run a script of this folder under horovodrun over gloo; return the result that each rank wrote."""
    paths = [str(HERE), str(HERE.parent / "shared"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    options = ["-np", str(ranks), "--gloo", "--network-interfaces", "lo"]
    launcher = [sys.executable, "-m", "horovod.runner.launch", *options]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, sys.executable, str(HERE / script), what, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def assert_nothing_wrong(results: list[dict], least: int) -> None:
    """Assert that each rank compared at least so many cases with the CPU, and found no difference."""
    for result in results:
        assert result["cases"] >= least
        assert not result["wrong"], "\n".join(result["wrong"])


def assert_trained(results: list[dict]) -> None:
    """Assert that each rank trained every method on the GPU, with the same bits as the others, and well."""
    for result in results:
        print(result)
        for method, found in result.items():
            assert found["ranks_agree"], method
            assert found["device"] == "cuda", method
            assert found["accuracy"] > 90, (method, found)


def draw_entries(n: int, k: int, value_dtype: str = "float32", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """k ascending indices of n, and values, on the CPU."""
    rng = np.random.default_rng([seed, n, k])
    indices = np.sort(rng.choice(n, k, replace=False)) if k < n else np.arange(n)
    values = rng.standard_normal(k).astype(np.float64 if value_dtype == "float64" else np.float32)
    values = torch.from_numpy(values)
    if value_dtype in LOW_BITS:
        values = ops.quantize(values, value_dtype)
    return torch.from_numpy(indices.astype(np.int64)), values


def packed(n: int, k: int, coding: str, value_dtype: str, seed: int = 0, entries: bool = True) -> torch.Tensor:
    """Make a payload on the CPU, of k entries or of none."""
    indices, values = draw_entries(n, k, value_dtype, seed)
    if not entries:
        indices, values = indices[:0], values[:0]
    out = torch.empty(ops.payload_size(n, k, coding, value_dtype), dtype=torch.uint8)
    ops.pack(indices, values, n, k, out, coding, value_dtype)
    return out
