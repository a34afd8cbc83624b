"""Model Figure 6 of Deep Gradient Compression: speed-up of 2 to 64 nodes over one, at 1 and at 10 Gbit/s.

    python benchmarks/network/dgc_figure_6.py

For AlexNet, the paper has enough data: the speed-up of dense training on 64 nodes is "about 30x" at 10 Gbit/s. This
gives the compute time of a node. The model then has to show "more than 40x" for DGC at 1 Gbit/s. For VGG-16 and
ResNet-50, the compute time is assumed: images per second of one of a node's four GPUs, with batches of 64 per GPU. The
plot shows DGC at density 0.001 twice: as in the paper, where the density doubles at each step of the exchange, as it
does in an all-gather of payloads; and with the measured gradient build-up. Writes results/dgc_figure_6.md and .png. The
last line of output is one JSON object.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import RESULTS
from costs import merged

from hvd_sparse.performance_model import Method, Network, Profile, dense

NODES = (2, 4, 8, 16, 32, 64)
RATES = {"1 Gbit/s": Network(1e9), "10 Gbit/s": Network(10e9)}
DENSITY = 0.001
MEASURED_GROWTH = 7.27 ** (1 / 3)  # results/comparison_pytorch_8_ranks.md: 8 ranks' sum is 7.27 times as dense, at 0.01
BATCH = 64  # per GPU


class Model(NamedTuple):
    """A network: its elements, and images per second on a GPU; None: computed from the paper's speed-up."""

    numel: int
    images_per_second: float | None


MODELS = {
    "AlexNet": Model(60_965_224, None),
    "VGG-16": Model(138_357_544, 140.0),
    "ResNet-50": Model(25_557_032, 210.0),
}
PAPER_NODES, PAPER_SPEEDUP = 64, 30.0  # AlexNet, dense, 10 Gbit/s


def profile(model: Model) -> Profile:
    """Return the profile of a node."""
    if model.images_per_second is not None:
        return Profile([model.numel], BATCH / model.images_per_second)
    exchange = RATES["10 Gbit/s"].all_reduce(4 * model.numel, PAPER_NODES)
    return Profile([model.numel], PAPER_SPEEDUP * exchange / (PAPER_NODES - PAPER_SPEEDUP))


def methods(model: Model) -> list[Method]:
    """Return the methods. All have the same profile, because the paper neglects the time of compression."""
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
    """Plot a panel for each model and link."""
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
