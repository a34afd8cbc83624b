"""Train a small transformer with Adam on simulated ranks, to compare ways to use sparse gradients with Adam.

    python benchmarks/adamw.py --steps 600 1800 --seeds 0 1 2

The model is a character-level GPT (0.64 M parameters) on the source of Python's standard library. The ranks run one
after the other. PyTorch computes the gradients, error feedback follows the papers' equations, and an exact top-k
selects in each tensor. The density falls to its final value over the first 100 steps. Writes results/adamw.json and
.md, and skips runs that the file already has. The last line of output is one JSON object.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import char_data
import pytorch_transformer
from common import RESULTS, load, missing, save

from hvd_sparse import native
from hvd_sparse.schedule import WarmUp
from hvd_sparse.wire import top_k_count

KEYS = ("method", "steps", "seed", "ranks", "lr")
WARM_UP = 100  # warm-up of the learning rate and of the density, in steps
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 3, 4, 64, 8
BETAS, EPS, WEIGHT_DECAY, CLIP_NORM = (0.9, 0.99), 1e-8, 0.1, 1.0
MIN_NUMEL = 1024  # tensors with fewer elements are sent dense


@dataclass(frozen=True)
class Method:
    """A way to combine sparse gradients with Adam.

    Args:
        density: Part of the elements to send.
        momentum: Momentum of DGC's velocity on each rank.
        betas: Betas of the optimizer.
        adam: "optimizer": Adam receives the sum of the sent gradients, as usual. "ranks": each rank applies Adam to its
            gradients, and sends the updates (Efficient-Adam).
        masks: Clear the first moment of sent elements.
    """

    density: float = 0.01
    momentum: float = 0.0
    betas: tuple[float, float] = BETAS
    adam: str = "optimizer"
    masks: bool = False


METHODS = {
    "dense": Method(density=1.0),
    "gradient_dropping": Method(),
    "gradient_dropping 0.05": Method(density=0.05),
    "dgc": Method(momentum=0.9),
    "dgc, beta1 0": Method(momentum=0.9, betas=(0.0, BETAS[1])),
    "dgc, beta1 0, 0.05": Method(density=0.05, momentum=0.9, betas=(0.0, BETAS[1])),
    "adam at the ranks": Method(adam="ranks"),
    "adam at the ranks, masked": Method(adam="ranks", masks=True),
}


class Rank:
    """One rank's batches, and one error-feedback buffer for each parameter."""

    def __init__(self, method: Method, parameters: list[torch.Tensor], batches: Iterator[torch.Tensor]):
        self.method, self.batches, self.step = method, batches, 0
        self.residuals, self.first, self.second = ([torch.zeros(p.numel()) for p in parameters] for _ in range(3))

    def accumulate(self, number: int, gradient: torch.Tensor, lr: float) -> torch.Tensor:
        """Add a gradient to the error feedback of a parameter; return the residual."""
        method, residual, first = self.method, self.residuals[number], self.first[number]
        if method.adam == "ranks":
            beta1, beta2 = method.betas
            first.lerp_(gradient, 1 - beta1)
            second = self.second[number].lerp_(gradient.square(), 1 - beta2)
            scale = lr / (1 - beta1**self.step)
            return residual.add_(scale * first / ((second / (1 - beta2**self.step)).sqrt() + EPS))
        if method.momentum == 0.0:
            return residual.add_(gradient)
        return residual.add_(first.mul_(method.momentum).add_(gradient))

    def take(self, number: int, k: int) -> torch.Tensor:
        """Return the selected elements of a residual, with zeros elsewhere; set them to zero in the residual."""
        residual, first = self.residuals[number], self.first[number]
        sent = torch.zeros_like(residual)
        places = torch.from_numpy(native.select_top_k(residual.numpy(), k, self.step)[0])
        sent[places] = residual[places]
        residual[places] = 0.0
        if k < len(residual) and (self.method.momentum or self.method.masks):
            first[places] = 0.0
        return sent


def windows(text: np.ndarray, rank: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield random windows of the text without end, [batch, length + 1]."""
    random = np.random.default_rng([seed, rank])
    while True:
        begins = random.integers(0, len(text) - LENGTH - 1, BATCH)
        yield torch.from_numpy(np.stack([text[begin : begin + LENGTH + 1] for begin in begins]))


def loss_of(model: torch.nn.Module, window: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the next characters, in nats."""
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def held_out_loss(model: torch.nn.Module, text: np.ndarray) -> float:
    """Return the loss on 256 windows of the held-out text."""
    begins = np.linspace(0, len(text) - LENGTH - 1, 256).astype(int)
    window = torch.from_numpy(np.stack([text[begin : begin + LENGTH + 1] for begin in begins]))
    with torch.no_grad():
        return float(loss_of(model, window))


def train(run: dict) -> dict:
    """Train a model; return a record of the run with its held-out loss."""
    method, steps = METHODS[run["method"]], run["steps"]
    training, held_out = char_data.load_text()
    torch.manual_seed(run["seed"])
    model = pytorch_transformer.Model(WIDTH, LAYERS, HEADS, LENGTH)
    parameters = list(model.parameters())
    ranks = [Rank(method, parameters, windows(training, rank, run["seed"])) for rank in range(run["ranks"])]
    decays = [{"params": [p for p in parameters if p.dim() > 1]}, {"params": [p for p in parameters if p.dim() < 2]}]
    decays[1]["weight_decay"] = 0.0
    if method.adam == "ranks":
        optimizer = torch.optim.SGD(decays, lr=1.0)
    else:
        optimizer = torch.optim.AdamW(decays, lr=run["lr"], betas=method.betas, eps=EPS, weight_decay=WEIGHT_DECAY)
    schedule = WarmUp(method.density, steps=WARM_UP) if method.density < 1.0 else None
    for step in range(steps):
        progress = max(0, step - WARM_UP) / max(1, steps - WARM_UP)
        lr = run["lr"] * min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * progress))
        density = schedule.density(step) if schedule else 1.0
        totals = [torch.zeros(parameter.numel()) for parameter in parameters]
        for rank in ranks:
            rank.step = step + 1
            gradients = torch.autograd.grad(loss_of(model, next(rank.batches)), parameters)
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
            for number, gradient in enumerate(gradients):
                n = gradient.numel()
                rank.accumulate(number, gradient.flatten() * min(1.0, CLIP_NORM / norm), lr)
                totals[number] += rank.take(number, top_k_count(n, density) if n >= MIN_NUMEL else n)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = (total / len(ranks)).view_as(parameter)
        for group in optimizer.param_groups:
            if method.adam == "ranks":  # the ranks' updates contain the learning rate
                decay = WEIGHT_DECAY if group is optimizer.param_groups[0] else 0.0
                torch._foreach_mul_([p.data for p in group["params"]], 1 - lr * decay)
            else:
                group["lr"] = lr
        optimizer.step()
    return {**run, **asdict(method), "loss": held_out_loss(model, held_out)}


def table(results: list[dict]) -> list[str]:
    """Return the lines of a Markdown table: one row for each method, one column for each number of steps."""
    lengths = sorted({one["steps"] for one in results})
    lines = ["# Adam", "", "`python benchmarks/adamw.py`; held-out loss, nats; means over seeds, and each seed.", ""]
    lines += ["| method | " + " | ".join(f"{steps} steps" for steps in lengths) + " |", "|---|" + "---|" * len(lengths)]
    for method in METHODS:
        cells = []
        for steps in lengths:
            losses = [one["loss"] for one in results if one["method"] == method and one["steps"] == steps]
            each = ", ".join(f"{loss:.3f}" for loss in losses)
            cells.append(f"{statistics.mean(losses):.3f} ({each})" if losses else "")
        if any(cells):
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, nargs="+", default=[600, 1800])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.out / "adamw.json"
    results = load(path)
    wanted = itertools.product(args.steps, args.seeds, args.methods)
    wanted = [(method, steps, seed, args.ranks, args.lr) for steps, seed, method in wanted]
    for method, steps, seed, *others in missing(wanted, results, KEYS):
        results.append(train(dict(zip(KEYS, (method, steps, seed, *others), strict=True))))
        save(path, results)
        print(f"{method}, {steps} steps, seed {seed}: {results[-1]['loss']:.3f}", flush=True)
    shown = [one for one in results if (one["ranks"], one["lr"]) == (args.ranks, args.lr)]
    (args.out / "adamw.md").write_text("\n".join(table(shown)))
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
