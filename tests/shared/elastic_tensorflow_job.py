"""The elastic job in TensorFlow: a third host is added. Each process writes its part to a file, as in `elastic_job`.

    horovodrun --gloo -np 2 --host-discovery-script ... python elastic_tensorflow_job.py FOLDER TRACED METHOD SETTINGS

TRACED says where the step is traced: "inside" the function given to hvd.elastic.run, again in each round; or "outside",
once.
"""

import json
import os
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState

from hvd_sparse.tensorflow import Compression

ALL = ("localhost", "127.1", "127.0.1")  # names of this machine; each counts as a separate host
BATCHES = 4  # batches with two ranks, and with three
directory, traced, method, settings = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])

hvd.init()
weights = tf.Variable(tf.zeros([3000]), name="weights")
compression = getattr(Compression, method)([weights], **settings)
draw = np.random.default_rng(os.getpid())
total = np.zeros(3000)


def make_step():
    """Return the training step: weights <- weights - sum of the ranks' gradients."""

    @tf.function
    def train_a_batch(gradient):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * gradient)
        tape = hvd.DistributedGradientTape(tape, compression=compression, op=hvd.Sum)
        weights.assign_sub(tape.gradient(loss, [weights])[0])

    return train_a_batch


once = make_step()


class State(ObjectState):
    """Broadcasts its variables in `sync`. Horovod's own state of TensorFlow 2 does so on creation, on new ranks."""

    def sync(self):
        hvd.broadcast_variables([weights], root_rank=0)
        super().sync()


@hvd.elastic.run
def train(state):
    """Train until both worlds have been seen."""
    global total
    step, batches = make_step() if traced == "inside" else once, 0
    while True:
        gradient = draw.integers(-2, 3, 3000)
        step(tf.constant(gradient, tf.float32))
        total, batches, state.batch = total + gradient, batches + 1, state.batch + 1
        state.sizes = [*state.sizes, hvd.size()]
        waiting = compression.state_dict()["memory"]["weights"]["residual"]
        partial = directory / f"{os.getpid()}.partial"
        with open(partial, "wb") as file:
            np.savez(file, total=total, waiting=waiting, moved=-weights.numpy(), batch=state.batch)
        partial.rename(directory / f"{os.getpid()}.npz")
        if batches == BATCHES and hvd.size() == 2 and hvd.rank() == 0:
            (directory / "next").write_text("".join(f"{name}:1\n" for name in ALL))
            (directory / "next").rename(directory / "hosts")
        over = float(batches >= BATCHES and hvd.size() == 3)
        if hvd.allreduce(tf.constant(over), op=hvd.Sum, name="over").numpy():
            return
        state.commit()
        time.sleep(0.02)


state = State(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, batch=0, sizes=[])
train(state)
print("ended", json.dumps({"sizes": state.sizes, "steps": int(compression.step)}), flush=True)
