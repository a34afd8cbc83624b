"""An elastic job of four ranks: repeatedly, a rank is killed in a step, and a new one replaces it.

    horovodrun --gloo -np 4 --host-discovery-script ... python elastic_job.py FOLDER STATE KILLS SEED

STATE is "summed": each commit has the sum of all residuals, and every rank takes its share after a failure. Or "own":
hvd.elastic's state contains the compressor, so each rank restores its own residual, and that of the killed rank is
lost. Gradients are small whole numbers, and the learning rate is 1. Each process records its gradients and its residual
as of its last commit; a process that will be killed in a step also records its gradient.
"""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import horovod.torch as hvd
import numpy as np
import torch
from elastic import NUMEL, RANKS, Place
from injector import Injector

from hvd_sparse.torch import Compression

STEADY = 3  # batches of each world
PHASES = ("backward", "compress", "wait", "decompress")
folder, kept, kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

torch.set_num_threads(1)
hvd.init()
faulthandler.enable()  # a rank that is aborted prints where it stands
place = Place(folder, hvd)
weights = torch.nn.Parameter(torch.zeros(NUMEL))
model = torch.nn.ParameterDict({"weights": weights})
compression = Compression.gradient_dropping([("weights", weights)], density=0.01, dense_fallback=None)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([weights], lr=1.0), [("weights", weights)], compression=compression, op=hvd.Sum
)
draw = np.random.default_rng(os.getpid())
total = committed = np.zeros(NUMEL)


def injector_for(number: int) -> Injector:
    """Return what kills a rank in this world of four: drawn alike on every rank."""
    random = np.random.default_rng([seed, number])
    fault = {"kind": "kill", "rank": int(random.integers(RANKS)), "step": STEADY + int(random.integers(3))}
    fault |= {"phase": PHASES[random.integers(len(PHASES))], "entry": 0}
    return Injector(fault if number < kills and hvd.size() == RANKS else None, hvd.rank())


def write_down(batch: int, gradient=0) -> None:
    """Record this process's gradients, its residual, the change of the weights, and a step's gradient."""
    waiting = compression.state_dict()["memory"]["weights"].get("residual", torch.zeros(NUMEL))
    partial = folder / f"{os.getpid()}.partial"
    with open(partial, "wb") as file:
        np.savez(file, total=committed, waiting=waiting, moved=-weights.detach().numpy(), batch=batch,
                 gradient=np.broadcast_to(gradient, NUMEL))  # fmt: skip
    partial.rename(folder / f"{os.getpid()}.npz")


@hvd.elastic.run
def train(state):
    """Train until as many ranks were killed as wanted, and replaced."""
    global total, committed
    if kept == "summed" and state.summed is not None:
        compression.load_state_dict(state.summed)
    total, batches = committed, 0
    if hvd.size() < RANKS and state.world == RANKS:
        state.kills += 1
    state.world = hvd.size()
    injector = injector_for(state.kills)
    if hvd.rank() == 0:
        place.say("begin", state)
    while True:
        injector.begin(batches)
        gradient = draw.integers(-2, 3, NUMEL)
        optimizer.zero_grad()
        loss = (weights * torch.tensor(gradient, dtype=torch.float32)).sum()
        if injector.fault and injector.fault["step"] == batches:
            place.say("kill", state)
            write_down(state.batch, gradient)
        injector.enter("backward")
        loss.backward()
        optimizer.step()
        total, batches, state.batch = total + gradient, batches + 1, state.batch + 1
        if hvd.rank() == 0 and batches == STEADY and hvd.size() < RANKS:
            place.replace_hosts()
        if kept == "summed":
            state.summed = compression.state_dict(summed=True)
        committed = total
        state.save()
        write_down(state.batch)
        if state.kills == kills and hvd.size() == RANKS and batches >= STEADY:
            return
        state.check_host_updates()
        time.sleep(0.02)


own = {"compression": compression} if kept == "own" else {}
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, world=0, kills=0, summed=None, **own)
train(state)
digest = hvd.allgather(weights.detach()[None], name="weights")
print(
    "ended",
    json.dumps({"pid": os.getpid(), "same": bool((digest == digest[0]).all()), "batch": state.batch}),
    flush=True,
)
