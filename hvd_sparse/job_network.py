"""Measures the network of a running job, of Horovod or of torchrun, for `hvd_sparse plan --measure`."""

import importlib
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hvd_sparse.library import FRAMEWORKS, require_horovod
from hvd_sparse.performance_model import CYCLE, FLOAT32, Network

SMALL, LARGE = 256, 4_000_000  # elements of the collectives that tell latency and bandwidth
ROUNDS = 5
CYCLES = {"horovod": CYCLE, "ddp": 0.0}  # of the hosts that exchange gradients: seconds that a collective waits
LAUNCHERS = {"horovod": "horovodrun -np 2", "ddp": "torchrun --no-python --nproc-per-node 2"}


class Job(NamedTuple):
    """A running job, as one of its ranks has measured it. The network is the same on all ranks."""

    network: Network
    world_size: int
    rank: int
    framework: str


class ProcessGroups:
    """The collectives of PyTorch's process groups on CPUs (gloo), with Horovod's names."""

    def __init__(self):
        self._torch = importlib.import_module("torch")
        self._dist = importlib.import_module("torch.distributed")
        self.size, self.rank = self._dist.get_world_size, self._dist.get_rank
        self.shutdown = self._dist.destroy_process_group

    def init(self) -> None:
        """Start torch.distributed as torchrun says; end the program where it has started nothing."""
        try:
            self._dist.init_process_group("gloo")
        except ValueError as error:
            raise SystemExit(f"hvd_sparse plan: --host ddp --measure needs a job of torchrun: {error}") from error

    def allreduce(self, tensor: Any, name: str) -> None:
        """Add a tensor up over all ranks."""
        self._dist.all_reduce(tensor)

    def allgather(self, tensor: Any, name: str) -> None:
        """Gather a tensor from all ranks."""
        self._dist.all_gather([self._torch.empty_like(tensor) for _ in range(self.size())], tensor)

    def broadcast_object(self, found: Any, root_rank: int, name: str) -> Any:
        """Return what one rank has found."""
        self._dist.broadcast_object_list(box := [found], root_rank)
        return box[0]


def measure_job(framework: str | None, host: str = "horovod") -> Job:
    """Measure the running job.

    Args:
        framework: "torch" or "tensorflow"; None: the first that is installed, and that Horovod is built for.
        host: "horovod", or "ddp" under torchrun.

    Raises:
        SystemExit: There is no such job, or it has one rank only.
    """
    hvd: Any = ProcessGroups() if host == "ddp" else horovod_of((framework,) if framework else FRAMEWORKS)
    framework = "torch" if host == "ddp" else hvd.__name__.partition(".")[2]
    hvd.init()
    world_size, rank = hvd.size(), hvd.rank()
    if world_size == 1:
        raise SystemExit(
            f"hvd_sparse plan: --measure needs a job of several ranks: {LAUNCHERS[host]} hvd_sparse plan ..."
        )
    network = measure_network(hvd, importlib.import_module(framework), CYCLES[host])
    hvd.shutdown()
    return Job(network, world_size, rank, framework)


def measure_network(hvd: Any, tensors: ModuleType, cycle: float = CYCLE) -> Network:
    """Return the network between the ranks of a running job of several: all-reduces and all-gathers are timed.

    Args:
        hvd: horovod.torch or horovod.tensorflow, initialized; or ProcessGroups.
        tensors: torch or tensorflow.
        cycle: Seconds that each collective waits for a cycle of Horovod.
    """

    def seconds(collective: str, elements: int) -> float:
        """Return the median time of a collective to which each rank gives so many elements."""
        with tensors.device("cpu"):
            tensor = tensors.ones([elements])
        times = []
        for number in range(ROUNDS + 1):
            start = time.perf_counter()
            getattr(hvd, collective)(tensor, name=f"hvd_sparse.plan.{collective}.{elements}.{number}")
            times.append(time.perf_counter() - start)
        return float(np.median(times[1:]))

    reduced = [seconds("allreduce", elements) for elements in (SMALL, LARGE)]
    gathered = [seconds("allgather", max(1, elements // hvd.size())) for elements in (SMALL, LARGE)]
    figures = hvd.broadcast_object([reduced, gathered], root_rank=0, name="hvd_sparse.plan")
    return network_from(*figures, hvd.size(), cycle)


def network_from(reduced: Sequence[float], gathered: Sequence[float], world_size: int, cycle: float = CYCLE) -> Network:
    """Return the network on which collectives of SMALL and of LARGE elements take these seconds.

    Args:
        reduced: Of ring all-reduces to which each rank gives so many elements.
        gathered: Of all-gathers whose result has so many elements.
        world_size: Number of ranks.
        cycle: Seconds of each that are a wait for a cycle of Horovod.
    """
    rounds = 2 * (world_size - 1)
    part = FLOAT32 / world_size  # bytes an element of a message
    slope, gather_slope = (max(1e-9, large - small) / (LARGE - SMALL) for small, large in (reduced, gathered))
    bandwidth = 8 * rounds * part / slope
    # In half of the all-reduce's rounds, an all-gather sends as many bytes.
    latency = (reduced[0] - cycle) / rounds - 8 * part * SMALL / bandwidth
    return Network(bandwidth, max(0.0, latency), 2 * gather_slope / slope)


def horovod_of(frameworks: tuple[str, ...]) -> ModuleType:
    """Return horovod.torch or horovod.tensorflow: the first whose framework is installed, and that is built for it."""
    reasons = []
    for framework in frameworks:
        try:
            require_horovod(framework)
            importlib.import_module(framework)
            return importlib.import_module(f"horovod.{framework}")
        except ImportError as error:
            reasons.append(f"{framework}: {error}")
    raise SystemExit("hvd_sparse plan: --measure needs Horovod and its framework\n" + "\n".join(reasons))
