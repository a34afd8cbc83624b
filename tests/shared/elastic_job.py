"""An elastic job whose hosts come and go. It has one line for compression, and a second one if the state contains it.

Gradients are small integers, and they are summed with a learning rate of 1. So the change of the weights must exactly
equal the gradients of all processes that ever ran, minus their residuals. Each process writes its part to a file.

    horovodrun --gloo -np 2 --host-discovery-script ... python elastic_job.py DIRECTORY SCENARIO METHOD SETTINGS

SCENARIO is "hosts": a third host is added, and later the second one is removed. Or "crash": one of three hosts dies in
a step, and the state, which contains the compressor, returns all ranks to the last commit.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch

from hvd_sparse.torch import Compression

ALL = ("localhost", "127.1", "127.0.1")  # names of this machine; each counts as a separate host
DOOMED = "127.1"
BATCHES = 4  # batches with each set of hosts
PAUSE = 0.02  # seconds per batch: waiting ranks leave the processor to a new process

directory, scenario, method, settings = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])

torch.set_num_threads(1)
hvd.init()
model = torch.nn.Linear(60, 50)
torch.nn.init.zeros_(model.weight)
torch.nn.init.zeros_(model.bias)
compression = getattr(Compression, method)(model.named_parameters(), **settings)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression=compression, op=hvd.Sum
)
draw = np.random.default_rng(os.getpid())
total = committed = np.zeros(3050)


def set_hosts(names):
    """Change the discovery script's hosts atomically."""
    (directory / "next").write_text("".join(f"{name}:1\n" for name in names))
    (directory / "next").rename(directory / "hosts")


def train_a_batch(dies):
    """Take a step with a gradient of small integers; return the gradient."""
    gradient = draw.integers(-2, 3, 3050)
    values = torch.tensor(gradient, dtype=torch.float32)
    optimizer.zero_grad()
    ((model.weight.view(-1) * values[:3000]).sum() + (model.bias * values[3000:]).sum()).backward()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    return gradient


def write_down(batch):
    """Record the gradients of this process and its residual after a batch that all ranks have finished."""
    memory = compression.state_dict()["memory"]
    waiting = [memory[name].get("residual", torch.zeros(size)) for name, size in (("weight", 3000), ("bias", 50))]
    moved = torch.cat([-model.weight.detach().view(-1), -model.bias.detach()])
    partial = directory / f"{os.getpid()}.partial"
    with open(partial, "wb") as file:
        np.savez(file, total=total, waiting=torch.cat(waiting).numpy(), moved=moved.numpy(), batch=batch)
    partial.rename(directory / f"{os.getpid()}.npz")


def is_over(state, batches):
    """Go through two, three and again two hosts; return whether each of these worlds has had its batches."""
    if batches < BATCHES:  # equal on all ranks, because each calls `train` again after a reset
        return False
    if scenario == "crash":
        return hvd.size() == 2
    if (state.world, hvd.size()) in ((0, 2), (1, 3)):
        state.world += 1
        if hvd.rank() == 0:
            set_hosts(ALL if state.world == 1 else [name for name in ALL if name != DOOMED])
    return (state.world, hvd.size()) == (2, 2)


@hvd.elastic.run
def train(state):
    """Train until all worlds have been seen."""
    global total, committed
    total, batches, is_doomed = committed, 0, os.environ["HOROVOD_HOSTNAME"] == DOOMED
    while True:
        total = total + train_a_batch(dies=scenario == "crash" and is_doomed and batches == BATCHES)
        batches, state.batch = batches + 1, state.batch + 1
        state.sizes = [*state.sizes, hvd.size()]
        write_down(state.batch)
        over = is_over(state, batches)
        if hvd.allreduce(torch.tensor([float(over)]), op=hvd.Sum, name="over").item():
            return
        committed = total
        state.commit()
        time.sleep(PAUSE)


kept = {"compression": compression} if scenario == "crash" else {}
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, world=0, sizes=[], **kept)
train(state)
print("ended", json.dumps({"sizes": state.sizes, "density": compression.stats()["step"]["density"]}), flush=True)
