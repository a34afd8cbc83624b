"""The elastic job in TensorFlow: a rank is killed at a random moment of a step or of the following commit.

    horovodrun --gloo -np 4 --host-discovery-script ... python elastic_tensorflow_job.py FOLDER summed KILLS SEED

Each commit has the variables and the sum of all residuals. A gradient depends only on process and batch, so the
scenario can compute all gradients from the list of processes. Gradients after the last commit do not count.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from elastic import NUMEL, RANKS, Place, gradient_of
from horovod.common.elastic import ObjectState

from hvd_sparse.tensorflow import Compression

STEADY = 3  # batches of each world
folder, _, kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

tf.config.threading.set_intra_op_parallelism_threads(1)
hvd.init()
faulthandler.enable()  # a rank that is aborted prints where it stands
place = Place(folder, hvd)
weights = tf.Variable(tf.zeros([NUMEL]), name="weights")
compression = Compression.gradient_dropping([weights], density=0.01, dense_fallback=None)


class State(ObjectState):
    """The variables, and what the arguments name."""

    def save(self):
        """Keep all of it."""
        self.weights = weights.numpy()
        super().save()

    def restore(self):
        """Go back to what was kept."""
        super().restore()
        weights.assign(self.weights)

    def sync(self):
        """Take what the first rank has kept."""
        super().sync()
        weights.assign(self.weights)


def make_step():
    """Return the training step: weights <- weights - sum of the ranks' gradients."""

    @tf.function
    def step(gradient):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * gradient)
        tape = hvd.DistributedGradientTape(tape, compression=compression, op=hvd.Sum)
        weights.assign_sub(tape.gradient(loss, [weights])[0])

    return step


def expect_death(state) -> None:
    """Let this process be killed in a moment, if it is the one that is drawn."""
    random = np.random.default_rng([seed, state.kills])
    who, delay = int(random.integers(RANKS)), float(random.uniform(0.0, 0.06))
    if state.kills == kills or hvd.size() != RANKS or hvd.rank() != who:
        return

    def die() -> None:
        """Say so, and be killed."""
        place.say("kill", state)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Timer(delay, die).start()


@hvd.elastic.run
def train(state):
    """Train until as many ranks were killed as wanted, and replaced."""
    if state.summed is not None:
        compression.load_state_dict(state.summed)
    if hvd.size() < RANKS and state.world == RANKS:
        state.kills += 1
    state.world, batches, step = hvd.size(), 0, make_step()
    place.say("begin", state)
    while True:
        if batches == STEADY:
            expect_death(state)
        step(tf.constant(gradient_of(os.getpid(), state.batch + 1), tf.float32))
        batches, state.batch = batches + 1, state.batch + 1
        if hvd.rank() == 0 and batches == STEADY and hvd.size() < RANKS:
            place.replace_hosts()
        state.summed = compression.state_dict(summed=True)
        state.save()
        if state.kills == kills and hvd.size() == RANKS and batches >= STEADY:
            return
        state.check_host_updates()
        time.sleep(0.02)


state = State(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, batch=0, world=0, kills=0, summed=None,
              weights=weights.numpy())  # fmt: skip
train(state)
waiting = compression.state_dict()["memory"]["weights"].get("residual", np.zeros(NUMEL))
np.savez(folder / f"{os.getpid()}.npz", waiting=waiting, moved=-weights.numpy(), batch=state.batch)
digest = hvd.allgather(weights.value()[None], name="digest").numpy()
print(
    "ended",
    json.dumps({"pid": os.getpid(), "same": bool((digest == digest[0]).all()), "batch": state.batch}),
    flush=True,
)
