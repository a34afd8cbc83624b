"""Figure 6 of Deep Gradient Compression: speed-up of 2 to 64 nodes over one, at 1 and at 10 Gbit/s, by the model.

    python benchmarks/network/dgc_figure_6.py

Of AlexNet the paper tells enough: dense training on 64 nodes is "about 30x" at 10 Gbit/s, which gives the time that a
node computes; then DGC has to reach "more than 40x" at 1 Gbit/s. What a node with VGG-16 and with ResNet-50 computes is
assumed: images a second of one of its four GPUs, batches of 64 a GPU. DGC at density 0.001 is drawn as the paper has
it, its density doubling at each step of the exchange, which is what an all-gather of payloads takes, too; and with the
growth that was measured. Writes results/dgc_figure_6.md and .png. Last line: one JSON object.
"""

import json
from pathlib import Path
from typing import NamedTuple

from hvd_sparse.performance_model import Method, Network, Profile, dense, merged

RESULTS = Path(__file__).resolve().parent.parent / "results"
NODES = (2, 4, 8, 16, 32, 64)
RATES = {"1 Gbit/s": Network(1e9), "10 Gbit/s": Network(10e9)}
DENSITY = 0.001
MEASURED_GROWTH = 7.26 ** (1 / 3)  # results/comparison_pytorch_8_ranks.md: the sum of 8 ranks' choices is 7.26 as dense
GPUS, BATCH = 4, 64  # of a node; of a GPU


class Model(NamedTuple):
    """A network: its elements, and the images a second of a GPU; None: from the paper's speed-up."""

    numel: int
    images_per_second: float | None


MODELS = {
    "AlexNet": Model(60_965_224, None),
    "VGG-16": Model(138_357_544, 140.0),
    "ResNet-50": Model(25_557_032, 210.0),
}
PAPER_NODES, PAPER_SPEEDUP = 64, 30.0  # AlexNet, dense, 10 Gbit/s


def profile(model: Model) -> Profile:
    """Return a node's profile."""
    if model.images_per_second is not None:
        return Profile([model.numel], BATCH / model.images_per_second)
    exchange = RATES["10 Gbit/s"].all_reduce(4 * model.numel, PAPER_NODES)
    return Profile([model.numel], PAPER_SPEEDUP * exchange / (PAPER_NODES - PAPER_SPEEDUP))


def methods(model: Model) -> list[Method]:
    """Return what is compared: with the same node, as the paper neglects what compression takes."""
    node = profile(model)
    return [
        Method("dense", dense(), node),
        Method("DGC, density doubles", merged(DENSITY), node),
        Method("DGC, density as measured", merged(DENSITY, growth=MEASURED_GROWTH), node),
    ]


def write(folder: Path) -> list[dict]:
    """Write the table and the plot; return the rows."""
    rows, lines = [], ["# Deep Gradient Compression, Figure 6: speed-up over one node", ""]
    lines += ["| model | link | method | " + " | ".join(f"{count} nodes" for count in NODES) + " |"]
    lines += ["|---|---|---|" + "---:|" * len(NODES)]
    for name, model in MODELS.items():
        for rate, network in RATES.items():
            for method in methods(model):
                speedups = [method.speedup(network, count) for count in NODES]
                rows.append({"model": name, "link": rate, "method": method.name, "speedup": speedups})
                lines.append(f"| {name} | {rate} | {method.name} | " + " | ".join(f"{s:.1f}" for s in speedups) + " |")
    (folder / "dgc_figure_6.md").write_text("\n".join([*lines, ""]))
    plot(rows, folder / "dgc_figure_6.png")
    return rows


def plot(rows: list[dict], path: Path) -> None:
    """Draw a panel for each model and link."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(MODELS), 3.4 * len(RATES)), layout="constrained")
    axes = figure.subplots(len(RATES), len(MODELS))
    for row, rate in zip(axes, RATES, strict=True):
        for axis, name in zip(row, MODELS, strict=True):
            for one in (one for one in rows if (one["model"], one["link"]) == (name, rate)):
                axis.plot(NODES, one["speedup"], marker="o", label=one["method"], linewidth=1)
            axis.plot(NODES, NODES, color="black", linestyle=":", linewidth=1, label="ideal")
            axis.set(title=f"{name}, {rate}", xlabel="nodes", ylabel="speed-up")
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    print(json.dumps({"benchmark": "dgc_figure_6", "rows": write(RESULTS)}))
