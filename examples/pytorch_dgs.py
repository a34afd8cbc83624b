"""Train asynchronously, sparse both ways (DGS), on digits or on the source of Python's standard library.

    mpirun -np 5 python examples/pytorch_dgs.py --method dgs --task digits

The last rank serves, the others work, each at its own pace; with --servers colocated all do both. Horovod is not used.
"""

import argparse
import itertools
import math
import time
from types import SimpleNamespace

import asynchronous_report
import digits_data
import numpy as np
import pytorch_char_lstm as char_lstm
import reporting
import torch
import torch.nn.functional as F
from pytorch_digits import Net, as_batch

from hvd_sparse.torch.asynchronous import METHODS, connect


def parse_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asynchronous_report.add_arguments(parser, METHODS)
    return asynchronous_report.parse_arguments(parser)


class Digits:
    """A small convolutional network on scikit-learn's digits."""

    batch_size, lr = 8, 0.05

    def __init__(self, args):
        self.model, self.args = Net(), args
        self.train_images, self.test_images, self.train_labels, self.test_labels = digits_data.load()

    def losses(self, worker):
        """Yield the loss of one batch after the other, for ever; each worker draws its own."""
        random = np.random.default_rng([self.args.seed, worker])
        while True:
            batch = random.integers(0, len(self.train_images), self.args.batch_size)
            images = digits_data.shifted(self.train_images[batch], random)
            images, labels = as_batch(images, self.train_labels[batch], "cpu")
            yield F.cross_entropy(self.model(images), labels)

    def evaluate(self, model):
        """Return what a model reaches on the test set."""
        images, labels = as_batch(self.test_images, self.test_labels, "cpu")
        with torch.no_grad():
            output = model(images)
        correct = (output.argmax(1) == labels).double().mean().item()
        return {"loss": F.cross_entropy(output, labels).item(), "accuracy": 100.0 * correct}


class CharLSTM:
    """A character-level LSTM on the text of the standard library's modules."""

    batch_size, lr = 8, 0.5

    def __init__(self, args):
        self.model, self.args = char_lstm.Model(64), args
        self.train_text, self.held_out_text = char_lstm.load_text()

    def losses(self, worker):
        """Yield the loss of one window after the other, for ever; each worker reads streams of its own."""
        args = self.args
        reading = SimpleNamespace(
            batch_size=args.batch_size, size=args.workers, rank=worker, sequence_length=32, device="cpu"
        )
        state = None
        for inputs, targets, is_start in char_lstm.training_windows(self.train_text, reading):
            state = None if is_start else tuple(part.detach() for part in state)
            output, state = self.model(inputs, state)
            yield F.cross_entropy(output.flatten(0, 1), targets.flatten())

    def evaluate(self, model):
        """Return what a model reaches on the held-out tenth of the text."""
        streams = char_lstm.split_streams(self.held_out_text, char_lstm.EVALUATION_STREAMS)
        with torch.no_grad():
            output, _ = model(streams[:, :-1])
            loss = F.cross_entropy(output.flatten(0, 1), streams[:, 1:].flatten()).item()
        return {"loss": loss, "perplexity": math.exp(loss)}


TASKS = {"digits": Digits, "char_lstm": CharLSTM}


def train(session, task, args):
    """Train this worker's share of the steps; return one dict of metrics an evaluation, on worker 0."""
    optimizer = session.optimizer(lr=args.lr, weight_decay=args.weight_decay)
    rows, since = [], time.perf_counter()
    interval = math.ceil(args.steps / args.evaluations)
    losses = []
    with reporting.progress(args.steps, args) as bar:
        for step, loss in enumerate(itertools.islice(task.losses(session.rank), args.steps)):
            optimizer.param_groups[0]["lr"] = reporting.learning_rate(args.lr, step, args.steps, args.warmup_steps)
            optimizer.zero_grad()
            loss.backward()
            if args.clip_norm:
                torch.nn.utils.clip_grad_norm_(task.model.parameters(), args.clip_norm)
            optimizer.step()
            if args.slow == session.rank:
                time.sleep((args.slow_factor - 1.0) * (time.perf_counter() - since))
            since = time.perf_counter()
            losses.append(loss.item())
            bar.update()
            if session.rank == 0 and ((step + 1) % interval == 0 or step + 1 == args.steps):
                rows.append({"step": step + 1, "train_loss": sum(losses) / len(losses), **evaluate(session, task)})
                losses = []
    return rows


def evaluate(session, task):
    """Return what the servers' model reaches now."""
    own = {name: value.clone() for name, value in task.model.state_dict().items()}
    task.model.load_state_dict(session.global_state_dict())
    task.model.eval()
    result = task.evaluate(task.model)
    task.model.load_state_dict(own)
    task.model.train()
    return result


def main():
    """Run the example; worker 0 reports."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    task = TASKS[args.task](args)
    args.batch_size, args.lr = args.batch_size or task.batch_size, args.lr or task.lr
    session = connect(
        task.model, METHODS[args.method](**asynchronous_report.settings(args)), servers=args.servers, overlap=args.overlap
    )
    args.rank, args.workers = session.rank, len(session.placement.workers)
    args.verbose = session.rank == 0 and not args.quiet
    if not session.is_worker:
        session.serve()
        return
    with session:
        start = time.perf_counter()
        rows = train(session, task, args)
        seconds = time.perf_counter() - start
        if session.rank == 0:
            asynchronous_report.finish("pytorch_dgs", args, rows, session.stats(), seconds)


if __name__ == "__main__":
    main()
