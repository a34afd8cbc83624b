"""Train asynchronously with a parameter server and dual-way sparsification (DGS), or one of its baselines.

    mpirun -np 4 python examples/tensorflow2_dgs.py --method dgs                       # three workers, one server
    mpirun -np 2 python examples/tensorflow2_dgs.py --task char_lstm --servers colocated

Tasks: `digits`, a convolutional network with batch normalisation, and `char_lstm`, an LSTM on the source of Python's
standard library. Works with Keras 3 and Keras 2 (TF_USE_LEGACY_KERAS=1); Horovod itself is not needed.
"""

import argparse
import dataclasses
import json
import math
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import asynchronous_report
import char_data
import digits_data
import numpy as np
import reporting
import tensorflow as tf
from mpi4py import MPI

from hvd_sparse.parameter_server.session import place
from hvd_sparse.tensorflow.asynchronous import METHODS, connect


def servers(text):
    """Read --servers."""
    return text if text == "colocated" else reporting.positive_integer(text)


def parse_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("method")
    group.add_argument("--method", choices=METHODS, default="dgs", help="(default: %(default)s)")
    group.add_argument(
        "--density", type=reporting.density, default=0.01, help="pushed; not of asgd, msgd (default: %(default)s)"
    )
    group.add_argument("--pull-density", type=reporting.density, help="of answers (default: all that changed)")
    group.add_argument(
        "--momentum", type=reporting.momentum, default=0.7, help="of dgs, dgc_async, msgd (default: %(default)s)"
    )
    group.add_argument("--servers", type=servers, default=1, help='ranks, or "colocated" (default: %(default)s)')
    group.add_argument("--overlap", action="store_true", help="compute while an answer is on its way")
    group = parser.add_argument_group("training")
    group.add_argument("--task", choices=TASKS, default="digits", help="(default: %(default)s)")
    group.add_argument("--epochs", type=reporting.positive_integer, default=20, help="of digits (default: %(default)s)")
    group.add_argument(
        "--steps", type=reporting.positive_integer, help="of each worker (default: --epochs; 2000 for char_lstm)"
    )
    group.add_argument("--warmup-steps", type=reporting.whole_number, help="(default: a tenth of the steps)")
    group.add_argument("--batch-size", type=reporting.positive_integer, default=8, help="(default: %(default)s)")
    group.add_argument("--lr", type=reporting.positive, help="peak (default: 0.02 for digits, 0.5 for char_lstm)")
    group.add_argument("--weight-decay", type=reporting.non_negative, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--clip-norm", type=reporting.non_negative, help="0: none (default: 0 for digits, 0.25 for char_lstm)"
    )
    group.add_argument("--hidden", type=reporting.positive_integer, default=64, help="of char_lstm (default: 64)")
    group.add_argument("--sequence-length", type=reporting.positive_integer, default=32, help="(default: %(default)s)")
    group.add_argument("--evaluations", type=reporting.positive_integer, default=5, help="(default: %(default)s)")
    group = parser.add_argument_group("run")
    group.add_argument("--seed", type=reporting.whole_number, default=0, help="(default: %(default)s)")
    group.add_argument("--plot", metavar="FILE", help="draw how stale updates were")
    group.add_argument("--quiet", action="store_true", help="print the JSON line only")
    return parser.parse_args()


def is_sparse(args):
    """Return whether the method pushes less than all."""
    return args.method not in ("asgd", "msgd")


def make_method(args):
    """Return the settings of the method, those that it has."""
    method = METHODS[args.method]
    settings = {"pull_density": args.pull_density, "seed": args.seed}
    if is_sparse(args):
        settings |= {"density": args.density, "warmup": args.warmup_steps or None}
    if "momentum" in {field.name for field in dataclasses.fields(method)}:
        settings["momentum"] = args.momentum
    return method(**settings)


class Digits:
    """Scikit-learn's digits: images float32[n, 8, 8, 1]. `args`: size and rank are those among the workers."""

    LR, CLIP_NORM, METRIC = 0.02, 0.0, "accuracy"

    def __init__(self, args):
        self.args = args
        self.train_images, self.test_images, self.train_labels, self.test_labels = digits_data.load()
        args.steps_per_epoch = len(self.train_images) // (args.batch_size * args.size)
        if not args.steps_per_epoch:
            raise SystemExit(f"--batch-size {args.batch_size} times {args.size} workers exceeds the training images")

    def steps(self):
        """Return how many steps a worker does."""
        return self.args.steps or self.args.epochs * self.args.steps_per_epoch

    def make_model(self):
        """Return the network, built."""
        layers = tf.keras.layers
        return tf.keras.Sequential(
            [
                tf.keras.Input((8, 8, 1)),
                layers.Conv2D(32, 3, padding="same", use_bias=False),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.MaxPool2D(2),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(10),
            ]
        )

    def batches(self):
        """Yield (inputs, targets) for ever: each epoch a permutation that the workers share out."""
        shifts, epoch = np.random.default_rng([self.args.seed, self.args.rank]), 0
        while True:
            for batch in digits_data.epoch_batches(len(self.train_images), epoch, self.args):
                images = digits_data.shifted(self.train_images[batch], shifts)
                yield (tf.constant(images[..., None]),), tf.constant(self.train_labels[batch])
            epoch += 1

    def carried(self, inputs, state):
        """Return what the model takes; nothing goes on from batch to batch."""
        return inputs[0]

    def split(self, outputs):
        """Return logits and state of what the model returned."""
        return outputs, ()

    def evaluate(self, model):
        """Return loss and accuracy, in percent, on the test set."""
        logits = model(self.test_images[..., None], training=False)
        accuracy = 100.0 * float(np.mean(np.argmax(logits, axis=1) == self.test_labels))
        return float(loss_of(self.test_labels, logits)), accuracy


class CharLSTM:
    """Characters int64[batch, length] with the state of an LSTM, which goes on from window to window."""

    LR, CLIP_NORM, METRIC = 0.5, 0.25, "perplexity"

    def __init__(self, args):
        self.args = args
        self.train_text, self.held_out = char_data.load_text()
        streams = char_data.split_streams(self.train_text, args.batch_size * args.size)
        if streams.shape[1] <= args.sequence_length:
            raise SystemExit(f"--batch-size {args.batch_size} or --sequence-length {args.sequence_length} is too large")
        self.streams = streams[args.rank :: args.size]

    def steps(self):
        """Return how many steps a worker does."""
        return self.args.steps or 2000

    def make_model(self):
        """Return embedding, LSTM and a linear layer: (characters, two states) to (logits, two states)."""
        layers, hidden = tf.keras.layers, self.args.hidden
        characters = tf.keras.Input((None,), dtype="int64")
        state = [tf.keras.Input((hidden,)), tf.keras.Input((hidden,))]
        embedded = layers.Embedding(len(char_data.CHARACTERS), 64)(characters)
        output, *after = layers.LSTM(hidden, return_sequences=True, return_state=True)(embedded, initial_state=state)
        return tf.keras.Model([characters, *state], [layers.Dense(len(char_data.CHARACTERS))(output), *after])

    def batches(self):
        """Yield (inputs, targets) for ever, in reading order; the first of a pass has a state of zeros with it."""
        length = self.args.sequence_length
        while True:
            for start in range(0, self.streams.shape[1] - length, length):
                window = self.streams[:, start : start + length + 1]
                zeros = () if start else self.zeros(len(window))
                yield (tf.constant(window[:, :-1]), *zeros), tf.constant(window[:, 1:])

    def zeros(self, batch):
        """Return the state to begin with."""
        return tf.zeros([batch, self.args.hidden]), tf.zeros([batch, self.args.hidden])

    def carried(self, inputs, state):
        """Return what the model takes: the state of before, unless a new one comes with the inputs."""
        return [inputs[0], *(inputs[1:] or state)]

    def split(self, outputs):
        """Return logits and state of what the model returned."""
        return outputs[0], tuple(outputs[1:])

    def evaluate(self, model):
        """Return loss a character, and perplexity, on the text that was held out."""
        run = tf.function(lambda inputs: model(inputs, training=False), reduce_retracing=True)
        streams = char_data.split_streams(self.held_out, char_data.EVALUATION_STREAMS)
        state, losses, count = self.zeros(len(streams)), 0.0, 0
        for start in range(0, streams.shape[1] - 1, 256):
            window = streams[:, start : start + 257]
            logits, state = self.split(run([tf.constant(window[:, :-1]), *state]))
            losses += float(loss_of(window[:, 1:], logits)) * window[:, 1:].size
            count += window[:, 1:].size
        return losses / count, math.exp(min(700.0, losses / count))


TASKS = {"digits": Digits, "char_lstm": CharLSTM}


def loss_of(labels, logits):
    """Return the mean cross entropy."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def make_step(task, model, optimizer, clip_norm):
    """Return a function that takes one training step on a batch, and returns loss and state."""

    @tf.function
    def step(inputs, targets, state):
        with tf.GradientTape() as tape:
            logits, state = task.split(model(task.carried(inputs, state), training=True))
            loss = loss_of(targets, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        if clip_norm:
            gradients, _ = tf.clip_by_global_norm(gradients, clip_norm)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, state

    return step


def train(session, task, model, args):
    """Train; return one dict of metrics an evaluation, on the first worker, of the model that the servers have."""
    optimizer = session.optimizer(
        lambda step: reporting.learning_rate(args.lr, step, args.steps, args.warmup_steps), args.weight_decay
    )
    step, batches, state = make_step(task, model, optimizer, args.clip_norm), task.batches(), ()
    everyones, rows, losses = task.make_model(), [], []
    interval = math.ceil(args.steps / args.evaluations)
    with reporting.progress(args.steps, args) as bar:
        for number in range(1, args.steps + 1):
            inputs, targets = next(batches)
            loss, state = step(inputs, targets, state)
            losses.append(float(loss))
            bar.update()
            if args.rank == 0 and (number % interval == 0 or number == args.steps):
                if number == args.steps:
                    wait_for_others(session, args.steps * args.size)
                session.load_global(everyones)
                loss, metric = task.evaluate(everyones)
                rows.append({"step": number, "train_loss": np.mean(losses), "loss": loss, task.METRIC: metric})
                bar.set_postfix(loss=f"{loss:.3f}", **{task.METRIC: f"{metric:.2f}"})
                losses = []
    return rows


def wait_for_others(session, updates, seconds=120.0):
    """Wait until the servers have so many updates, those of all workers, or it has taken too long."""
    end = time.monotonic() + seconds
    while session.stats()["all"]["pushes"] < updates and time.monotonic() < end:
        time.sleep(0.05)


def report(rows, stats, seconds, task, args):
    """Print table, what travelled, and a JSON line; draw the plot."""
    if args.verbose:
        reporting.print_table([{key: float(value) for key, value in row.items()} for row in rows])
        print(asynchronous_report.report(stats))
    if args.plot:
        asynchronous_report.plot(stats, args.plot)
    names = "method task density pull_density momentum servers overlap steps batch_size lr seed"
    settings = {name: getattr(args, name) for name in names.split()}
    results = {"loss": rows[-1]["loss"], task.METRIC: rows[-1][task.METRIC], "seconds": seconds, "workers": args.size}
    print(json.dumps({"example": "tensorflow2_dgs", **settings, **results, "stats": stats}), flush=True)


def start(args):
    """Prepare TensorFlow, find this rank's place among the workers, and fill in what depends on it; return the task."""
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ.get("OMP_NUM_THREADS", "0")))
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.keras.utils.set_random_seed(args.seed)
    try:
        workers = place(MPI.COMM_WORLD.Get_size(), args.servers).workers
    except ValueError as error:
        raise SystemExit(str(error)) from None
    rank = MPI.COMM_WORLD.Get_rank()
    args.size, args.rank = len(workers), workers.index(rank) if rank in workers else 0
    args.verbose = rank == 0 and not args.quiet
    task = TASKS[args.task](args)
    args.steps = task.steps()
    args.warmup_steps = min(args.steps, args.steps // 10 if args.warmup_steps is None else args.warmup_steps)
    args.lr = args.lr or task.LR
    args.density = args.density if is_sparse(args) else 1.0
    args.clip_norm = task.CLIP_NORM if args.clip_norm is None else args.clip_norm
    return task


def main():
    """Run the example on every rank: servers serve, workers train, the first of them reports."""
    args = parse_arguments()
    task = start(args)
    model = task.make_model()
    session = connect(model, make_method(args), servers=args.servers, overlap=args.overlap)
    if not session.is_worker:
        session.serve()
        return
    begin = time.perf_counter()
    with session:
        rows = train(session, task, model, args)
        if args.rank == 0:
            report(rows, session.stats(), time.perf_counter() - begin, task, args)


if __name__ == "__main__":
    main()
