"""Measure how sparse boundaries of pipeline stages affect quality: a click model in one process.

    make results-boundaries      or: python benchmarks/boundaries.py --seeds 0 1 2

The clicks are generated (`examples/click_data.py`), and the model is like DLRM. As in "Dynamic Communication
Thresholding" (section 3.1), one boundary is after the second layer of the first MLP, another after the second layer of
the second MLP. All runs of a seed use the same batches. The results correspond to tables 1 and 6, to the curves of
occupancy and threshold (figures 5 and 6b), and to the variant that fails (appendix C): a gradient reduced to its own
largest elements, with and without error feedback. Writes results/boundaries.{json,md,png}, and skips runs that the file
already has. Results of other settings are never overwritten. The last line of output is one JSON object.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

import torch
from common import RESULTS, ROOT, missing, refuse_other_settings
from machine import machine
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "examples"))
SERIES_EVERY = 50  # steps between two points of a curve
WATCHED = (0.25, 0.1, 0.05)  # densities whose thresholds are recorded in the run without boundaries

# {name: (number of splits, kind of boundary, density)}
RUNS = {"dense": (0, "topk", 1.0)}
RUNS |= {f"topk, 1 split, {d:g}": (1, "topk", d) for d in (0.25, 0.1, 0.05, 0.02)}
RUNS |= {f"topk, 2 splits, {d:g}": (2, "topk", d) for d in (0.25, 0.1, 0.05)}
RUNS |= {f"laplace, 1 split, {d:g}": (1, "laplace", d) for d in (0.25, 0.1, 0.05, 0.02)}
RUNS |= {f"laplace, 2 splits, {d:g}": (2, "laplace", d) for d in (0.1,)}
RUNS |= {f"gradient alone, {d:g}": (1, "gradient", d) for d in (0.5, 0.25, 0.1, 0.05)}
RUNS |= {f"gradient alone with feedback, {d:g}": (1, "feedback", d) for d in (0.5, 0.25, 0.1, 0.05)}
RUNS |= {f"topk with feedback, {d:g}": (1, "masked feedback", d) for d in (0.05,)}


class CutGradient(torch.autograd.Function):
    """Passes activations unchanged, and replaces their gradient by the result of `cut`."""

    @staticmethod
    def forward(ctx, x, cut):
        """Return x."""
        ctx.cut = cut
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        """Return the reduced gradient."""
        return ctx.cut(gradient), None


class GradientBoundary(torch.nn.Module):
    """Appendix C: sends the largest elements of each row of the gradient, with or without error feedback."""

    def __init__(self, density, feedback, activations):
        super().__init__()
        from hvd_sparse.torch.model_parallel import ThresholdBoundary

        self.boundary, self.feedback, self.activations = ThresholdBoundary(density), feedback, activations
        self.memory = 0.0

    def forward(self, x):
        """Return the activations, whole or only the large ones. The gradient is later masked at the same places."""
        if not torch.is_grad_enabled():
            return self.boundary(x) if self.activations else x
        if self.activations:
            mask = self.boundary.mask(x).view(x.shape)
            return CutGradient.apply(x * mask, lambda gradient: self.cut(gradient, mask))
        return CutGradient.apply(x, lambda gradient: self.cut(gradient, None))

    def cut(self, gradient, mask):
        """Return the selected elements of gradient plus residual. There is a residual for each place in the batch."""
        whole = gradient + self.memory if self.feedback else gradient
        kept = whole * (self.boundary.mask(whole) if mask is None else mask)
        self.memory = whole - kept if self.feedback else 0.0
        return kept


def make_boundary(kind, density):
    """Return a module for one split."""
    from hvd_sparse.torch.model_parallel import ThresholdBoundary

    if kind in ("gradient", "feedback"):
        return GradientBoundary(density, kind == "feedback", activations=False)
    if kind == "masked feedback":
        return GradientBoundary(density, True, activations=True)
    return ThresholdBoundary(density, kind)


def make_network(splits, kind, density, seed):
    """Return the stages and the boundaries between them."""
    import pytorch_click_model as model

    stages = model.make_stages(3, seed)  # the same parameters with any number of splits
    boundaries = [make_boundary(kind, density) for _ in range(splits)] + [None] * (2 - splits)
    return stages, boundaries


def run_network(stages, boundaries, features, categories):
    """Return logits, and the dense activations at the splits."""
    first, _ = stages[0](features, categories)
    second = stages[1](first if boundaries[0] is None else boundaries[0](first), categories)
    return stages[2](second if boundaries[1] is None else boundaries[1](second)), [first, second]


def evaluate(network, clicks):
    """Return the cross-entropy in nats per click, and the accuracy in percent, on the test set."""
    stages, boundaries = network
    for module in [*stages, *filter(None, boundaries)]:
        module.eval()
    with torch.no_grad():
        logits, _ = run_network(stages, boundaries, torch.from_numpy(clicks.dense), torch.from_numpy(clicks.categories))
        labels = torch.from_numpy(clicks.clicked)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).item()
        return loss, 100.0 * ((logits > 0) == (labels > 0)).double().mean().item()


def watch(boundaries, activations):
    """Return occupancy and threshold of the boundaries; without boundaries, the thresholds that top-k would have."""
    if boundaries[0] is None:
        from hvd_sparse.torch import row_ops as ops

        rows = activations[0].detach()
        found = [ops.select_top_k_rows(rows, round(d * rows.shape[1]))[1].mean().item() for d in WATCHED]
        return {f"threshold {d:g}": value for d, value in zip(WATCHED, found, strict=True)}
    stats = [boundary.stats() for boundary in boundaries if hasattr(boundary, "stats")]
    return {"occupancy": [one["occupancy"] for one in stats], "threshold": [one["threshold"] for one in stats]}


def train(job):
    """Train once; return a record of the run with its results."""
    import click_data

    run, args = job
    torch.set_num_threads(1)
    train_set = click_data.Clicks(args.rows, seed=0)
    test_set = click_data.Clicks(args.rows // 10, seed=1)
    splits, kind, density = RUNS[run["name"]]
    stages, boundaries = network = make_network(splits, kind, density, run["seed"])
    optimizer = torch.optim.Adam([p for stage in stages for p in stage.parameters()], lr=args.lr)
    losses, curve, begin = [], [], time.perf_counter()
    order = click_data.batches(train_set, args.batch_size, run["seed"])
    for step, batch in zip(range(args.steps), order, strict=False):
        features, categories = torch.from_numpy(train_set.dense[batch]), torch.from_numpy(train_set.categories[batch])
        logits, activations = run_network(stages, boundaries, features, categories)
        labels = torch.from_numpy(train_set.clicked[batch])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % SERIES_EVERY == 0 or step == args.steps - 1:
            curve.append({"step": step, **watch(boundaries, activations)})
    test_loss, accuracy = evaluate(network, test_set)
    tail = losses[-max(1, args.steps // 10) :]
    results = {"loss": test_loss, "accuracy": accuracy, "train_loss": statistics.mean(tail)}
    return {**run, **results, "best_loss": test_set.best_loss(), "seconds": time.perf_counter() - begin, "curve": curve}


def table(results):
    """Return a Markdown table: means over seeds, and each seed's difference from dense."""
    lines = [
        "| | train loss | test loss | against dense, % | each seed, % | accuracy, % | occupancy at the end |",
        "|---|---:|---:|---:|---|---:|---|",
    ]
    dense = {run["seed"]: run["loss"] for run in results if run["name"] == "dense"}
    for name in RUNS:
        runs = [run for run in results if run["name"] == name]
        if not runs:
            continue
        mean = {key: statistics.mean(run[key] for run in runs) for key in ("train_loss", "loss", "accuracy")}
        each = [100.0 * (run["loss"] / dense[run["seed"]] - 1.0) for run in runs if run["seed"] in dense]
        last = [run["curve"][-1].get("occupancy", []) for run in runs]
        occupancy = ", ".join(f"{statistics.mean(values):.4f}" for values in zip(*last, strict=True))
        difference = f"{statistics.mean(each):+.2f} | {', '.join(f'{value:+.2f}' for value in each)}" if each else " | "
        lines.append(
            f"| {name} | {mean['train_loss']:.4f} | {mean['loss']:.4f} | {difference} | {mean['accuracy']:.2f} | "
            f"{occupancy} |"
        )
    return "\n".join(lines)


def plot(results, path):
    """Plot the occupancy with "laplace" (figure 6b) and the thresholds with and without boundaries (figure 5)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = {run["name"]: run["curve"] for run in results if run["seed"] == results[0]["seed"]}
    for density in WATCHED:
        name, colour = f"laplace, 1 split, {density:g}", f"C{WATCHED.index(density)}"
        if name in curves:
            left.plot(*points(curves[name], lambda point: point["occupancy"][0]), color=colour, label=f"{density:g}")
            left.axhline(density, color=colour, linestyle=":")
        if "dense" in curves:
            watched = points(curves["dense"], lambda point, key=f"threshold {density:g}": point[key])
            right.plot(*watched, color=colour, label=f"{density:g}")
        if (name := f"topk, 1 split, {density:g}") in curves:
            right.plot(*points(curves[name], lambda point: point["threshold"][0]), color=colour, linestyle="--")
    left.set(xlabel="step", ylabel="occupancy", title="threshold of a Laplace distribution", yscale="log")
    right.set(xlabel="step", ylabel="mean top-k threshold", title="dense (lines), with a boundary (dashed)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(title="density")
    figure.savefig(path, dpi=120)


def points(curve, value):
    """Return the steps and values of a curve."""
    return [point["step"] for point in curve], [value(point) for point in curve]


def write(results, settings, out):
    """Write runs, table and plot; return the table."""
    out.mkdir(parents=True, exist_ok=True)
    summary = {"settings": settings, "machine": machine(), "runs": results}
    (out / "boundaries.json").write_text(json.dumps(summary) + "\n")
    text = table(results)
    (out / "boundaries.md").write_text(f"{text}\n")
    plot(results, out / "boundaries.png")
    return text


def main():
    """Run what is missing, and write the results after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="(default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=200000, help="samples to train on (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="of Adam (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.rows < args.batch_size:
        parser.error(f"--batch-size {args.batch_size} is more than --rows {args.rows}: raise --rows")
    settings = {key: getattr(args, key) for key in ("steps", "rows", "batch_size", "lr")}
    file = args.out / "boundaries.json"
    before = json.loads(file.read_text()) if file.exists() else {"settings": settings, "runs": []}
    refuse_other_settings(file, before["settings"], settings)
    results = before["runs"]
    wanted = missing([(name, seed) for seed in args.seeds for name in args.runs], results, ("name", "seed"))
    jobs = [({"name": name, "seed": seed}, args) for name, seed in wanted]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for result in tqdm(pool.imap(train, jobs), total=len(jobs), unit="run"):
            results.append(result)
            write(results, settings, args.out)
    print(write(results, settings, args.out))
    print(json.dumps({"benchmark": "boundaries", **settings, "runs": len(results)}))


if __name__ == "__main__":
    main()
