"""Faults in one rank of a synchronous job of three: killed, stopped, delayed, failing, leaving, corrupted payloads."""

import hashlib
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import forked
import numpy as np
from injector import GraphInjector, Injector
from scenario import Found, Scenario

RANKS, STEPS, EVERY = 3, 8, 3  # ranks, steps, and steps between two checkpoints
SIZES = {"weight": 3000, "bias": 50}
PHASES = ("backward", "compress", "select", "exchange", "wait", "decompress", "checkpoint", "file")
GRAPH_PHASES = ("backward", "compress", "exchange", "decompress", "checkpoint", "file")
SETTINGS = {"min_numel": 100, "dense_fallback": None}
DENSITIES = (0.01, 0.5)  # payloads in an all-reduce, and in an all-gather
ENDS = ("kill", "raise", "leave")  # the job, too
REFUSED = {  # the errors of the ranks that receive a damaged payload, and of the rank that sent it
    "torch": (
        "^ValueError: hvd_sparse.reduce_bucket: from rank {}: payload ",
        "^ValueError: hvd_sparse.clear_bucket: payload ",
    ),
    "tensorflow": ("^InvalidArgumentError: .*hvd_sparse.reduce_bucket: from rank {}: payload ",) * 2,
}
TOLD = re.compile("HorovodInternalError|Horovod has been shut down|UnknownError|CancelledError|Aborted")
SUBMISSION = re.compile(r"Current thread .*\n.*horovod/torch/mpi_ops.py.* in _all\w+_async")
_expected: dict[tuple[str, float], list[str]] = {}


def gradients(step: int, rank: int, scale: int = 1) -> dict[str, np.ndarray]:
    """Return small whole numbers, float32: sums are exact."""
    draw = np.random.default_rng([step, rank])
    return {name: draw.integers(-2, 3, scale * size).astype(np.float32) for name, size in SIZES.items()}


def torch_job(
    rank: int, fault: dict | None, folder: str, density: float, steps: int = STEPS, scale: int = 1, pause: float = 0.0
) -> list[str]:
    """Train; write down a digest of the parameters after each step, and when the fault is to happen.

    scale: how many times larger the model is. pause: seconds to wait after each step.
    """
    import horovod.torch as hvd
    import torch

    from hvd_sparse.checkpoint import atomic_file
    from hvd_sparse.torch import Compression

    torch.set_num_threads(1)
    hvd.init()
    injector = Injector(fault, rank)
    model = {name: torch.nn.Parameter(torch.zeros(scale * size)) for name, size in SIZES.items()}
    compression = Compression.gradient_dropping(model.items(), density=density, **SETTINGS)
    inner = torch.optim.SGD(list(model.values()), lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, model.items(), compression=compression, op=hvd.Sum)
    for step in range(steps):
        injector.begin(step)
        optimizer.zero_grad()
        loss = sum((model[name] * torch.from_numpy(one)).sum() for name, one in gradients(step, rank, scale).items())
        injector.enter("backward")
        loss.backward()
        optimizer.step()
        note(folder, rank, [one.detach().numpy() for one in model.values()])
        if step % EVERY == 0:
            with atomic_file(f"{folder}/{rank}.pt") as file:
                torch.save(compression.state_dict(), file)
        time.sleep(pause)
    hvd.shutdown()
    return notes(folder, rank)


def tensorflow_job(rank: int, fault: dict | None, folder: str, density: float) -> list[str]:
    """Train as `torch_job` does."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_sparse.checkpoint import atomic_file
    from hvd_sparse.tensorflow import Compression

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    injector = GraphInjector(fault, rank)
    model = {name: tf.Variable(tf.zeros([size]), name=name) for name, size in SIZES.items()}
    compression = Compression.gradient_dropping(list(model.values()), density=density, **SETTINGS)

    @tf.function
    def train(given):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(model[name] * one) for name, one in given.items()])
        tape = hvd.DistributedGradientTape(tape, compression=compression, op=hvd.Sum)
        for variable, reduced in zip(model.values(), tape.gradient(loss, list(model.values())), strict=True):
            variable.assign_sub(reduced)

    for step in range(STEPS):
        injector.begin(step)
        injector.enter("backward")
        train({name: tf.constant(one) for name, one in gradients(step, rank).items()})
        note(folder, rank, [one.numpy() for one in model.values()])
        if step % EVERY == 0:
            injector.enter("checkpoint")
            with atomic_file(f"{folder}/{rank}.npy") as file:
                np.save(file, compression.state_dict(), allow_pickle=True)
    hvd.shutdown()
    return notes(folder, rank)


JOBS = {"torch": torch_job, "tensorflow": tensorflow_job}


def note(folder: str, rank: int, arrays: list[np.ndarray]) -> None:
    """Write down what a step made of the parameters."""
    digest = hashlib.sha256(b"".join(one.tobytes() for one in arrays)).hexdigest()[:16]
    with open(f"{folder}/{rank}.notes", "a") as file:
        file.write(digest + "\n")


def notes(folder: str, rank: int) -> list[str]:
    """Return what was written down."""
    path = Path(f"{folder}/{rank}.notes")
    return path.read_text().split() if path.exists() else []


def submitting_job(rank: int, density: float) -> None:
    """Take a step; then one rank is killed, and the other submits with a step in flight, and keeps Python's lock.

    Horovod's thread, which drops what is in flight, could have Python's lock only between two of Python's switches, of
    which there are none here.
    """
    import horovod.torch as hvd
    import torch

    from hvd_sparse.torch import Compression

    torch.set_num_threads(1)
    hvd.init()
    model = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
    compression = Compression.gradient_dropping(model.items(), density=density, **SETTINGS)
    inner = torch.optim.SGD(list(model.values()), lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, model.items(), compression=compression, op=hvd.Sum)
    for step in range(2):
        loss = sum((model[name] * torch.from_numpy(one)).sum() for name, one in gradients(step, rank).items())
        if step == 1 and rank == 1:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    tensors = [torch.ones(4) for _ in range(4000)]
    holders = [one.detach() for one in tensors]  # which hold them as the product holds its own
    for holder, one in zip(holders, tensors, strict=True):
        holder.grad = one
    sys.setswitchinterval(1000.0)
    for number, one in enumerate(tensors):
        hvd.allreduce_async_(one, name=f"more.{number}", op=hvd.Sum)
        wait = time.monotonic() + 0.002
        while time.monotonic() < wait:
            pass


def submits(found: Found, number: int) -> None:
    """Make a job of two ranks, one of which is killed."""
    forked.preload("torch")
    density = DENSITIES[number % 2]
    job = forked.run(lambda rank: submitting_job(rank, density), 2, limit=30.0)
    killed, left = job.ranks[1], job.ranks[0]
    found.check(killed.status == forked.KILLED and not job.hung, f"density {density}: hung\n{job.describe()}")
    found.check(bool(TOLD.search(left.error)), f"density {density}: not told why\n{job.describe()}")
    found.worst = max(found.worst, left.seconds - killed.seconds)


def expected(framework: str, density: float) -> list[str]:
    """Return the digests of a run that nothing disturbs."""
    forked.preload(framework)
    if (framework, density) not in _expected:
        with tempfile.TemporaryDirectory() as folder:
            job = forked.run(lambda rank: JOBS[framework](rank, None, folder, density), RANKS, limit=300.0)
            if any(one.status != 0 for one in job.ranks) or len({tuple(one.result) for one in job.ranks}) != 1:
                raise RuntimeError(f"the undisturbed job failed: {job.describe()}")
            _expected[framework, density] = job.ranks[0].result
    return _expected[framework, density]


def drawn(number: int, kinds: tuple[str, ...], seconds: float, seed: int, phases=PHASES) -> dict:
    """Return a fault drawn by the number of the try: every kind and phase in turn, all else at random."""
    random = np.random.default_rng([seed, number])
    kind, phase = kinds[number % len(kinds)], phases[number // len(kinds) % len(phases)]
    phase = "exchange" if kind == "corrupt" else phase
    step = int(random.integers(STEPS))
    step -= step % EVERY if phase in ("checkpoint", "file") else 0
    entry = int(random.integers(2)) if phase in ("compress", "decompress") else 0
    fault = {"kind": kind, "phase": phase, "step": step, "rank": int(random.integers(RANKS)), "entry": entry}
    return fault | {"seconds": seconds, "bit": int(random.integers(2**20))}


def disturb(framework: str, kinds: tuple[str, ...], seconds: float = 0.5, seed: int = 0, phases=PHASES):
    """Return what makes a try: one job with one fault in it."""

    def run(found: Found, number: int) -> None:
        fault, density = drawn(number, kinds, seconds, seed, phases), DENSITIES[number % 2]
        whole = expected(framework, density)
        with tempfile.TemporaryDirectory() as folder:
            told = {**fault, "told": f"{folder}/told"}
            job = forked.run(lambda rank: JOBS[framework](rank, told, folder, density), RANKS, limit=40.0 + 2 * seconds)
            done, happened = [notes(folder, rank) for rank in range(RANKS)], Path(told["told"]).exists()
        title = f"{framework}, density {density}, {fault}: "
        found.check(happened, title + "it did not happen\n" + job.describe())
        if not found.check(not job.hung, title + "hung\n" + job.describe()):
            if all(SUBMISSION.search(job.ranks[rank].output) for rank in job.hung):
                found.note("hangs: in Horovod's own submission of a collective")
            return
        same = all(one == whole[: len(one)] for one in done)
        found.check(same, title + "ranks differ from the undisturbed run\n" + job.describe())
        judge(found, framework, fault, job, title)

    return run


def judge(found: Found, framework: str, fault: dict, job: forked.Job, title: str) -> None:
    """Check how a job with a fault has ended."""
    victim, others = job.ranks[fault["rank"]], [one for i, one in enumerate(job.ranks) if i != fault["rank"]]
    if fault["kind"] in ENDS:
        status = {"kill": forked.KILLED, "raise": 1, "leave": 1}[fault["kind"]]
        found.check(victim.status == status, title + "another end\n" + job.describe())
        told = all(TOLD.search(one.error) or one.status == 0 for one in others)
        found.check(told, title + "the others were not told why\n" + job.describe())
        found.worst = max(found.worst, *(one.seconds - victim.seconds for one in others))
    elif fault["kind"] == "corrupt":
        named, own = (text.format(fault["rank"]) for text in REFUSED[framework])
        refused = all(re.search(named, one.error, re.DOTALL) for one in others)
        refused = refused and re.search(own, victim.error, re.DOTALL)
        found.check(bool(refused), title + "not refused by all alike\n" + job.describe())
    else:
        found.check(all(one.status == 0 for one in job.ranks), title + job.describe())


def stopped(framework: str, seconds: float):
    """Return what makes a try: a rank is stopped for so long; then all go on, with the same results."""
    return disturb(framework, ("stop",), seconds, seed=3, phases=("backward", "compress", "decompress"))


SCENARIOS = {
    "ends_torch": Scenario(
        "2", "a rank is killed, raises or leaves, in any of 8 phases, PyTorch", 150, disturb("torch", ENDS)
    ),
    "ends_tensorflow": Scenario(
        "2",
        "a rank is killed or raises, in any of 6 phases, TensorFlow",
        12,
        disturb("tensorflow", ENDS[:2], phases=GRAPH_PHASES),
    ),
    "submits_torch": Scenario(
        "2", "a rank submits while Horovod drops what is in flight, as another was killed, PyTorch", 20, submits
    ),
    "delays_torch": Scenario(
        "2",
        "a rank is delayed or stopped for 0.5 s, in any phase, PyTorch",
        60,
        disturb("torch", ("delay", "stop"), seed=1),
    ),
    "delays_tensorflow": Scenario(
        "2",
        "a rank is delayed or stopped for 0.5 s, in any phase, TensorFlow",
        6,
        disturb("tensorflow", ("delay", "stop"), seed=1, phases=GRAPH_PHASES),
    ),
    "corrupted_torch": Scenario(
        "2",
        "a bit of a payload is flipped between compress and all-gather, PyTorch",
        60,
        disturb("torch", ("corrupt",), seed=2),
    ),
    "corrupted_tensorflow": Scenario(
        "2",
        "a bit of a payload is flipped between compress and all-gather, TensorFlow",
        6,
        disturb("tensorflow", ("corrupt",), seed=2),
    ),
    "stopped_5_torch": Scenario("3", "SIGSTOP of a rank for 5 s, PyTorch", 6, stopped("torch", 5.0)),
    "stopped_60_torch": Scenario("3", "SIGSTOP of a rank for 60 s, PyTorch", 1, stopped("torch", 60.0)),
}
