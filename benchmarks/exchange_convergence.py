"""Train with a gather, a reduce-scatter, and a completed reduce-scatter on simulated ranks; write the table.

    python benchmarks/exchange_convergence.py --tasks digits char_lstm --ranks 4 8 --seeds 0 1 2
    python benchmarks/exchange_convergence.py --name dgc_ablation --exchanges gather --densities 0.001 \\
        --ranks 4 8 16 32 --methods dgc "dgc, no masking" "dgc, no warm-up" gradient_dropping

The ranks run one after the other. PyTorch computes the gradients, and NumPy the error feedback by the papers'
equations. Regions and payloads use the code of real training jobs (`hvd_sparse.reduce_scatter`). There is one joint
selection in the whole model. The density falls to its final value over the first tenth of the steps. `completed` is a
reduce-scatter with `complete=True`.

The second command is an ablation of Deep Gradient Compression: without momentum factor masking, without warm-up, and
without momentum correction. The last one is Gradient Dropping with momentum in the optimizer. Writes results/NAME.json
and .md, and skips runs that the file already has. The last line of output is one JSON object.
"""

import argparse
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import char_data
import digits_data
import pytorch_char_lstm
import pytorch_digits
from common import RESULTS, load, missing, save

from hvd_sparse import native
from hvd_sparse.reduce_scatter import MessageFormat, Regions, SparseVector, add_in_order
from hvd_sparse.schedule import Constant, WarmUp
from hvd_sparse.wire import payload_size, top_k_count

KEYS = ("task", "ranks", "method", "exchange", "density", "seed")
MOMENTUM = 0.9
Step = Callable[[int], torch.Tensor]


class Task(NamedTuple):
    """A training task: it makes a model and batches, and computes the loss of a batch and the metric of a model."""

    build: Callable
    batches: Callable
    loss: Callable
    test: Callable
    metric: str
    steps: int
    lr: float
    clip_norm: float | None


def digits_batches(rank: int, ranks: int, seed: int) -> Iterator[tuple]:
    """Yield a rank's batches without end."""
    images, _, labels, _ = digits_data.load()
    random = np.random.default_rng([seed, rank])
    own = np.arange(len(images))[rank::ranks]
    while True:
        chosen = random.choice(own, 8, replace=False)
        shifted = digits_data.shifted(images[chosen], random)
        yield torch.from_numpy(shifted).unsqueeze(1), torch.from_numpy(labels[chosen])


def digits_loss(model, batch, state):
    """Return the loss of a batch, and None: there is no state."""
    return F.cross_entropy(model(batch[0]), batch[1]), None


def digits_test(model) -> float:
    """Return the accuracy on the test images, in percent."""
    _, images, _, labels = digits_data.load()
    with torch.no_grad():
        output = model(torch.from_numpy(images).unsqueeze(1))
    return 100.0 * float((output.argmax(1).numpy() == labels).mean())


def text_batches(rank: int, ranks: int, seed: int) -> Iterator[tuple]:
    """Yield consecutive windows of a rank's streams without end."""
    text = torch.from_numpy(char_data.load_text()[0])
    args = argparse.Namespace(batch_size=8, size=ranks, rank=rank, sequence_length=32, device="cpu")
    return pytorch_char_lstm.training_windows(text, args)


def text_loss(model, batch, state):
    """Return the loss of a window, and the LSTM state at its end."""
    inputs, targets, is_start = batch
    output, state = model(inputs, None if is_start else state)
    return F.cross_entropy(output.flatten(0, 1), targets.flatten()), tuple(part.detach() for part in state)


def text_test(model) -> float:
    """Return the perplexity on the held-out text."""
    text = torch.from_numpy(char_data.load_text()[1])
    with torch.no_grad():
        windows = char_data.split_streams(text, char_data.EVALUATION_STREAMS)[:, :2048].split(256, dim=1)
        losses = [float(F.cross_entropy(model(one[:, :-1])[0].flatten(0, 1), one[:, 1:].flatten())) for one in windows]
    return float(np.exp(statistics.mean(losses)))


TASKS = {
    "digits": Task(pytorch_digits.Net, digits_batches, digits_loss, digits_test, "accuracy", 600, 0.05, None),
    "char_lstm": Task(
        lambda: pytorch_char_lstm.Model(64), text_batches, text_loss, text_test, "perplexity", 1500, 1.0, 0.25
    ),
}


class Method(NamedTuple):
    """The rank's part of a method. If the rank has no momentum, the optimizer has it."""

    momentum: float  # momentum of the velocity
    masks: bool = True
    warms_up: bool = True


METHODS = {
    "dense": Method(0.0),
    "gradient_dropping": Method(0.0),
    "dgc": Method(MOMENTUM),
    "dgc, no masking": Method(MOMENTUM, masks=False),
    "dgc, no warm-up": Method(MOMENTUM, warms_up=False),
}


class Rank:
    """One rank's batches and error feedback."""

    def __init__(self, n: int, method: Method, batches: Iterator[tuple]):
        self.residual, self.velocity = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.momentum, self.masks, self.batches, self.state = method.momentum, method.masks, batches, None

    def accumulate(self, gradient: np.ndarray) -> None:
        """Add a gradient to the error feedback, with momentum correction (DGC, section 3.2) if there is momentum."""
        self.velocity = self.momentum * self.velocity + gradient
        self.residual += self.velocity

    def clear(self, indices: np.ndarray) -> None:
        """Clear residual and velocity at delivered places: momentum factor masking (DGC, section 3.3)."""
        self.residual[indices] = 0.0
        if self.masks:
            self.velocity[indices] = 0.0


class Exchanged(NamedTuple):
    """The sum over ranks at the exchanged places, and the bytes that rank 0 received."""

    entries: SparseVector
    received: int


def gather(ranks: list[Rank], selected: list[SparseVector], n: int, k: int) -> Exchanged:
    """Exchange all selections: every rank receives each of them."""
    for rank, own in zip(ranks, selected, strict=True):
        rank.clear(own.indices)
    return Exchanged(add_in_order(selected), (len(ranks) - 1) * payload_size(n, k))


def reduce_scatter(
    ranks: list[Rank], selected: list[SparseVector], n: int, k: int, completes: bool = False
) -> Exchanged:
    """Exchange by reduce-scatter: the owner of each region adds the selections, and keeps the k / N largest sums."""
    regions = [
        Regions(MessageFormat(n, k, "run_length", "float32", "mean"), len(ranks), rank) for rank in range(len(ranks))
    ]
    counts = sum(one.count(own) for one, own in zip(regions, selected, strict=True))
    for one in regions:
        one.balance(counts)
    sent = [one.split(own) for one, own in zip(regions, selected, strict=True)]
    parts = [np.split(one.message, np.cumsum(one.splits)[:-1]) for one in sent]
    payloads, received = [], 0
    for owner, one in enumerate(regions):
        message = np.concatenate([part[owner] for part in parts])
        payloads.append(one.reduce(message, sent[owner].padding, 0)[0])
        received += message.size - int(sent[owner].splits[owner]) if owner == 0 else 0
    kept = regions[0].join(np.concatenate(payloads))
    received += sum(payload.size for payload in payloads[1:])
    if completes:
        kept = SparseVector(
            kept.indices, np.sum([rank.residual[kept.indices] for rank in ranks], axis=0, dtype=np.float32)
        )
        received += int(2 * 4 * kept.indices.size * (len(ranks) - 1) / len(ranks))
    for rank, own in zip(ranks, selected, strict=True):
        rank.clear(kept.indices if completes else np.intersect1d(own.indices, kept.indices, assume_unique=True))
    return Exchanged(kept, received)


def completed(ranks: list[Rank], selected: list[SparseVector], n: int, k: int) -> Exchanged:
    """Exchange by reduce-scatter, then add the residuals of all ranks where owners have kept a sum."""
    return reduce_scatter(ranks, selected, n, k, completes=True)


EXCHANGES = {"gather": gather, "reduce_scatter": reduce_scatter, "completed": completed}


def train(run: dict) -> dict:
    """Train a model. Return its metric, and means of the bytes that rank 0 received and of the elements changed."""
    task, count = TASKS[run["task"]], run["ranks"]
    torch.manual_seed(run["seed"])
    model = task.build()
    parameters = list(model.parameters())
    n, is_dense = sum(parameter.numel() for parameter in parameters), run["exchange"] == "dense"
    method = METHODS[run["method"]]
    ranks = [Rank(n, method, task.batches(rank, count, run["seed"])) for rank in range(count)]
    optimizer = torch.optim.SGD(parameters, lr=task.lr, momentum=0.0 if method.momentum else MOMENTUM)
    warmup = task.steps // 10
    schedule = WarmUp(run["density"], steps=warmup) if method.warms_up else Constant(run["density"])
    received, changed = 0, 0
    for step in range(task.steps):
        clip_norm = None if is_dense else task.clip_norm
        gradients = [gradient_of(model, parameters, rank, task.loss, clip_norm, count) for rank in ranks]
        if is_dense:
            total = np.sum(gradients, axis=0)
            if task.clip_norm is not None:  # of the mean, as dense training does
                total *= min(1.0, task.clip_norm * count / (float(np.linalg.norm(total)) + 1e-12))
            received, changed = received + 8 * n * (count - 1) // count, changed + n
        else:
            k = top_k_count(n, schedule.density(step))
            selected = []
            for rank, gradient in zip(ranks, gradients, strict=True):
                rank.accumulate(gradient)
                indices, values, _ = native.select_top_k(rank.residual, k, step)
                selected.append(SparseVector(indices, values))
            exchanged = EXCHANGES[run["exchange"]](ranks, selected, n, k)
            total = np.zeros(n, np.float32)
            total[exchanged.entries.indices] = exchanged.entries.values
            received, changed = received + exchanged.received, changed + exchanged.entries.indices.size
        for parameter, part in zip(parameters, torch.from_numpy(total / count).split(sizes(parameters)), strict=True):
            parameter.grad = part.view_as(parameter)
        progress = max(0, step - warmup) / (task.steps - warmup)
        optimizer.param_groups[0]["lr"] = task.lr * min(1.0, (step + 1) / warmup) * 0.5 * (1 + np.cos(np.pi * progress))
        optimizer.step()
    residual = float(np.mean([np.linalg.norm(rank.residual) for rank in ranks]))
    figures = {"metric": task.test(model), "residual_norm": residual}
    return {**run, **figures, "received": received / task.steps, "changed": changed / task.steps}


def sizes(parameters: list[torch.Tensor]) -> list[int]:
    """Return the number of elements of each parameter."""
    return [parameter.numel() for parameter in parameters]


def gradient_of(model, parameters, rank: Rank, loss_of, clip_norm: float | None, count: int):
    """Return a rank's gradient, float32[n]. It is clipped before the accumulation (DGC, section 3.2)."""
    loss, rank.state = loss_of(model, next(rank.batches), rank.state)
    flat = torch.cat([one.reshape(-1) for one in torch.autograd.grad(loss, parameters)])
    if clip_norm is not None:
        bound = clip_norm * count**0.5 if rank.momentum else clip_norm  # it holds for the reduced gradient: appendix C
        flat *= min(1.0, bound / (float(flat.norm()) + 1e-12))
    return flat.numpy()


def table(results: list[dict]) -> list[str]:
    """Return the lines of a Markdown table: means over the seeds. Above it are the commands that made the runs."""
    commands = dict.fromkeys(one["command"] for one in results if "command" in one)
    told = ", ".join(f"`{command}`" for command in commands)
    lines = ["# Convergence on simulated ranks", "", f"{told}; means over seeds.", ""]
    lines += [
        "| task | ranks | method | density | exchange | accuracy, % or perplexity | each seed | KB received a step |"
    ]
    lines[-1] += " elements changed | norm of a residual |"
    lines += ["|---|---:|---|---:|---|---:|---|---:|---:|---:|"]
    for key in dict.fromkeys(tuple(one[name] for name in KEYS[:-1]) for one in results):
        own = [one for one in results if tuple(one[name] for name in KEYS[:-1]) == key]
        task, ranks, method, exchange, density = key
        metrics = [one["metric"] for one in own]
        means = [statistics.mean(one[name] for one in own) for name in ("received", "changed", "residual_norm")]
        digits = 2 if task == "digits" else 3
        cells = [task, str(ranks), method, f"{density:g}", exchange, f"{statistics.mean(metrics):.{digits}f}"]
        cells += [", ".join(f"{one:.{digits}f}" for one in metrics), f"{means[0] / 1e3:.1f}", f"{means[1]:,.0f}"]
        lines.append("| " + " | ".join([*cells, f"{means[2]:.2f}"]) + " |")
    return [*lines, ""]


def asked(args: argparse.Namespace) -> Iterator[tuple]:
    """Yield the runs: dense once, then all combinations of the arguments."""
    for task, ranks in itertools.product(args.tasks, args.ranks):
        yield from ((task, ranks, "dense", "dense", 1.0, seed) for seed in args.seeds)
        for density, method, exchange in itertools.product(args.densities, args.methods, args.exchanges):
            yield from ((task, ranks, method, exchange, density, seed) for seed in args.seeds)


def main() -> None:
    """Run what is missing; write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.01, 0.001])
    sparse = [method for method in METHODS if method != "dense"]  # which is always there
    parser.add_argument("--methods", nargs="+", choices=sparse, default=["gradient_dropping", "dgc"])
    parser.add_argument("--exchanges", nargs="+", choices=EXCHANGES, default=list(EXCHANGES))
    parser.add_argument("--name", default="exchange_convergence", help="of the results (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.out / f"{args.name}.json"
    results = load(path)
    command = shlex.join(["python", "benchmarks/exchange_convergence.py", *sys.argv[1:]])
    for wanted in missing(asked(args), results, KEYS):
        results.append({**train(dict(zip(KEYS, wanted, strict=True))), "command": command})
        save(path, results)
        print(f"{', '.join(map(str, wanted))}: {results[-1]['metric']:.4g}", flush=True)
    (args.out / f"{args.name}.md").write_text("\n".join(table(results)))
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
