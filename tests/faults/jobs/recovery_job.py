"""Train a small network on digits with DGS, workers and one server; go on from a saved file where there is one.

    mpirun -np 4 python recovery_job.py FOLDER SEED PUSHES SAVED

Workers train until the server has had PUSHES pushes of all of them together, those before the save included. The first
worker saves to SAVED every so often; each writes down the loss of the servers' model at its end. A fault is in the
environment, for `injector`.
"""

import itertools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch
from injector import Injector
from mpi4py import MPI
from sklearn.datasets import load_digits

from hvd_sparse.torch.asynchronous import DGS, connect

SILENCE, TIMEOUT = 2.0, 10.0  # seconds
BATCH, LEARNING_RATE = 16, 0.05
EVERY, SAVES = 10, 3  # steps from one look at the number of pushes to the next; of these, every so many save
folder, seed, pushes, saved = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
rank = MPI.COMM_WORLD.Get_rank()


def main() -> dict:
    """Be a worker or the server; return what a worker has to say."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    injector = Injector.from_environment(rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    restore, before = None, 0
    if saved.exists():
        restore = str(saved)
        before = json.loads(str(np.load(saved)["settings"]))["statistics"]["all"]["pushes"]
    workers = MPI.COMM_WORLD.Split(rank < MPI.COMM_WORLD.Get_size() - 1)
    method = DGS(density=0.05, momentum=0.7, min_numel=100)
    session = connect(model, method, servers=1, restore=restore, timeout=TIMEOUT, silence=SILENCE)
    if not session.is_worker:
        session.serve()
        return {}
    inputs, targets = (torch.from_numpy(one) for one in load_digits(return_X_y=True))
    inputs, draw = inputs.float() / 16, np.random.default_rng([seed, rank, before])
    optimizer = session.optimizer(lr=LEARNING_RATE)
    with session:
        if rank == 0 and restore is None:
            session.save(str(saved))
        workers.Barrier()  # a fault comes after this: on a busy machine, the first worker may begin after the others
        for step in itertools.count():
            injector.begin(step)
            batch = draw.integers(0, len(inputs), BATCH)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
            if step % EVERY == 0 and before + session.stats()["all"]["pushes"] >= pushes:
                break
            if rank == 0 and restore is None and step % (EVERY * SAVES) == 0:
                session.save(str(saved))
        model.load_state_dict(session.global_state_dict())
        with torch.no_grad():
            loss = float(torch.nn.functional.cross_entropy(model(inputs), targets))
    return {"loss": loss, "before": before}


status: dict = {}
try:
    status = main()
except BaseException as error:
    status = {"error": f"{type(error).__name__}: {error}"}
    raise
finally:
    (folder / f"{rank}.json").write_text(json.dumps({**status, "time": time.time()}))
