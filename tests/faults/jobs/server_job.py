"""Workers and servers of an asynchronous run, with a fault in a worker's push or in a server's update.

    mpirun -np 3 python server_job.py FOLDER SERVERS PAUSE

`injector` reads the fault from the environment. A worker waits PAUSE seconds after each step. Gradients are small whole
numbers, and the learning rate is 1, so the change of the servers' parameters must exactly equal the gradients of all
workers minus their residuals. Each rank records these numbers, and how it ended.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
from injector import Injector
from mpi4py import MPI

from hvd_sparse.parameter_server import METHODS
from hvd_sparse.parameter_server.session import Session

SHAPES, STEPS = {"weight": (60, 50), "bias": (20,)}, 40
SILENCE, TIMEOUT = 2.0, 25.0  # seconds
folder, servers, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rank = MPI.COMM_WORLD.Get_rank()


def write_down(**arrays) -> None:
    """Record this rank's gradients and residual, or the change of the server's parameters."""
    partial = folder / f"{rank}.partial"
    with open(partial, "wb") as file:
        np.savez(file, **arrays)
    partial.rename(folder / f"{rank}.npz")


def work(session: Session, parameters: dict[str, np.ndarray], injector: Injector) -> None:
    """Train; the fault, if it is here, happens in the push of a step."""
    session._join({name: array.reshape(-1) for name, array in parameters.items()})
    draw, total = np.random.default_rng(rank), np.zeros(session.layout.numel)
    with session:
        for step in range(STEPS):
            injector.begin(step)
            gradients = {
                name: draw.integers(-2, 3, array.size).astype(np.float32) for name, array in parameters.items()
            }
            session._push(gradients, dict.fromkeys(SHAPES, 1.0))
            total += session.layout.flatten(gradients)
            write_down(total=total, waiting=session.worker.residual)
            time.sleep(pause)


def main() -> None:
    """Be a worker or a server."""
    injector = Injector.from_environment(rank)
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    method = METHODS["gd_async"](density=0.05, min_numel=100)
    session = Session(parameters, method, servers=servers, timeout=TIMEOUT, silence=SILENCE)
    if session.is_worker:
        return work(session, parameters, injector)
    [(number, server)] = session._local.servers.items()
    begin, end = session.layout.shards(servers)[number]
    departures = session.serve()
    write_down(moved=-server.parameters, begin=begin, end=end)
    (folder / f"{rank}.departures").write_text(json.dumps({str(worker): why for worker, why in departures.items()}))


status = {}
try:
    main()
except BaseException as error:
    status = {"error": f"{type(error).__name__}: {error}"}
    raise
finally:
    (folder / f"{rank}.json").write_text(json.dumps({**status, "time": time.time()}))
