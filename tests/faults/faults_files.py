"""Checkpoints: loaded with any other number of ranks, and files whose writer is killed."""

import itertools
import os
import signal
import tempfile
import time
from pathlib import Path

import forked
import numpy as np
from gradients import draw
from scenario import Found, Scenario

from hvd_sparse.checkpoint import atomic_file

MOST = 8  # ranks
SHAPES = {"weight": (60, 50), "head": (701,), "bias": (20,)}
SETTINGS = {"density": 0.05, "momentum": 0.9, "min_numel": 100}
STEPS = 3


def carry_torch(rank: int, number: int, n: int, folder: str) -> list[str]:
    """Train N ranks, save their sum, load it in M ranks, for all M; return what is not as it should be."""
    import horovod.torch as hvd
    import torch
    from helpers import drive, make_parameters

    from hvd_sparse.torch import Compression

    torch.set_num_threads(1)
    hvd.init()
    sets = {m: hvd.add_process_set(list(range(m))) for m in range(1, MOST)} | {MOST: hvd.global_process_set}
    parameters, path, own = make_parameters(SHAPES), f"{folder}/{n}.pt", {}
    if sets[n].included():
        compression = Compression.dgc(parameters.items(), process_set=sets[n], **SETTINGS)
        for step in range(STEPS):
            drive(compression, parameters, draw(SHAPES, step, rank, seed=number), process_set=sets[n])
        own = compression.state_dict()["memory"]
        state = compression.state_dict(summed=True)
        if rank == 0:
            with atomic_file(path) as file:
                torch.save(state, file)
    before = everyone(hvd, torch, own)
    state = torch.load(path, weights_only=True)
    wrong = [f"{n} ranks: {what}" for what in differences(state, before, rounded=True)]
    for m in range(1, MOST + 1):
        loaded = {}
        if sets[m].included():
            heir = Compression.dgc(make_parameters(SHAPES).items(), process_set=sets[m], **SETTINGS)
            heir.load_state_dict(state)
            loaded = heir.state_dict()["memory"]
        after = everyone(hvd, torch, loaded)
        wrong += [f"{n} -> {m} ranks: {what}" for what in differences(state, after, rounded=False)]
    hvd.shutdown()
    return wrong


def everyone(hvd, torch, memory: dict) -> dict:
    """Return the sums over all ranks of residuals and velocities, in float64; a rank outside gives zeros."""
    sums = {}
    for name, kind in itertools.product(SHAPES, ("residual", "velocity")):
        own = memory.get(name, {}).get(kind, torch.zeros(int(np.prod(SHAPES[name]))))
        sums[name, kind] = hvd.allreduce(own.double(), op=hvd.Sum, name="everyone").numpy()
    return sums


def carry_tensorflow(rank: int, number: int, n: int, folder: str) -> list[str]:
    """Do the same in TensorFlow."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_sparse.tensorflow import Compression

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    from tf_helpers import Reducer, make_variables, total  # asks Horovod for its size

    sets = {m: hvd.add_process_set(list(range(m))) for m in range(1, MOST)} | {MOST: hvd.global_process_set}

    def sums(compression) -> dict:
        """Return the sums over all ranks, in float64."""
        memory = {} if compression is None else compression.state_dict()["memory"]
        zero = {name: np.zeros(int(np.prod(shape)), np.float32) for name, shape in SHAPES.items()}
        pairs = itertools.product(SHAPES, ("residual", "velocity"))
        return {(name, kind): total(memory.get(name, {}).get(kind, zero[name])) for name, kind in pairs}

    variables, path, compression = make_variables(SHAPES), f"{folder}/{n}.npz", None
    if sets[n].included():
        compression = Compression.dgc(list(variables.values()), process_set=sets[n], **SETTINGS)
        reducer = Reducer(variables, compression, process_set=sets[n])
        for step in range(STEPS):
            reducer(draw(SHAPES, step, rank, seed=number))
        state = compression.state_dict(summed=True)
        if rank == 0:
            with atomic_file(path) as file:
                np.savez(file, state=np.array(state, object))
    before = sums(compression)
    state = np.load(path, allow_pickle=True)["state"].item()
    wrong = [f"{n} ranks: {what}" for what in differences(state, before, rounded=True)]
    for m in range(1, MOST + 1):
        heir = None
        if sets[m].included():
            heir = Compression.dgc(list(make_variables(SHAPES).values()), process_set=sets[m], **SETTINGS)
            heir.load_state_dict(state)
        wrong += [f"{n} -> {m} ranks: {what}" for what in differences(state, sums(heir), rounded=False)]
    hvd.shutdown()
    return wrong


def differences(state: dict, sums: dict, rounded: bool) -> list[str]:
    """Return where a saved sum is not that of the ranks; `rounded`: to float32, once."""
    wrong = []
    for (name, kind), expected in sums.items():
        saved = np.asarray(state["memory"][name].get(kind, np.zeros(expected.size)), np.float32).reshape(-1)
        expected = expected.astype(np.float32) if rounded else expected
        if not np.array_equal(saved.astype(expected.dtype), expected):
            wrong.append(f"{kind} of {name}: {np.abs(saved - expected).max()} off")
    return wrong


def carry(framework: str, function, least: int):
    """Return what makes a try: one job of 8 ranks, one N of `least` to 8 after the other, each with all M."""

    def run(found: Found, number: int) -> None:
        forked.preload(framework)
        n = MOST - number % (MOST - least + 1)
        with tempfile.TemporaryDirectory() as folder:
            dynamic = [("HOROVOD_DYNAMIC_PROCESS_SETS", "1")]
            job = forked.run(lambda rank: function(rank, number, n, folder), MOST, 300.0, dynamic)
        found.tries += MOST
        if found.check(all(rank.status == 0 for rank in job.ranks), job.describe()):
            for rank, one in enumerate(job.ranks):
                found.check(not one.result, f"rank {rank}: {one.result[:5]}")

    return run


def killed_writer(found: Found, number: int) -> None:
    """Kill a process at a random time while it writes checkpoints; then read the file."""
    random = np.random.default_rng(number)
    with tempfile.TemporaryDirectory() as folder:
        path, read = Path(folder) / "state.npz", 0
        _write(path, 0)
        pid = os.fork()
        if pid == 0:
            for version in range(1, 10**9):
                _write(path, version)
        deadline, last = time.monotonic() + random.uniform(0.0, 0.3), 0
        while time.monotonic() < deadline:
            version = _read(path)  # while it is written
            if not found.check(version is not None and version >= last, f"try {number}: {version} after {last}"):
                break
            last, read = version, read + 1
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        version = _read(path)
        found.check(version is not None and version >= last, f"try {number}: {version} after {last}, killed")


def _write(path: Path, version: int) -> None:
    with atomic_file(path) as file:
        np.savez(file, begin=np.array(version), body=np.full(30_000, version, np.float32), end=np.array(version))


def _read(path: Path) -> int | None:
    """Return the version of a file, None if it is a mixture or none at all."""
    try:
        with np.load(path) as file:
            found = {int(file["begin"]), int(file["end"]), *map(int, np.unique(file["body"]))}
    except Exception:
        return None
    return found.pop() if len(found) == 1 else None


SCENARIOS = {
    "carry_torch": Scenario(
        "4", "residual and velocity of N ranks to M, N, M in 1..8, PyTorch", 64, carry("torch", carry_torch, 1), "pairs"
    ),
    "carry_tensorflow": Scenario(
        "4",
        "the same for N in 2..8, TensorFlow; one rank alone has nothing that waits",
        56,
        carry("tensorflow", carry_tensorflow, 2),
        "pairs",
    ),
    "killed_writer": Scenario("4", "SIGKILL while a checkpoint is written", 200, killed_writer),
}
