"""Compares the step times that `hvd_sparse.performance_model` predicts with those that `run.py` measured."""

import dataclasses
import statistics
from pathlib import Path

from costs import hierarchical
from methods import METHODS, Method
from models import numels
from records import UNLIMITED, without_limit

from hvd_sparse import performance_model as model
from hvd_sparse.plan import rate

TCP = 0.95  # share of the nominal rate that TCP headers leave, for DDP
OVERLAP = 0.5  # part of a rank's compute time: from the first gradient of the backward pass to the last


def validate(results: list[dict], folder: Path) -> list[str]:
    """Plot predicted against measured steps; return lines of Markdown with their differences.

    The profile of a rank is what this rank measured: compute, compress, decompress, and the rest of a step on links
    without a limit.
    """
    points = [(run, prediction) for run in results if (prediction := predicted(run, results)) is not None]
    if not points:
        return []
    plot(points, folder / "network_model.png")
    lines = ["## The performance model", "", "Steps in milliseconds, by `hvd_sparse.performance_model`.", ""]
    lines += ["| model | hosts | rate | method | measured | predicted | error |", "|---|---:|---|---|---:|---:|---:|"]
    errors = []
    for run, prediction in points:
        errors.append(prediction / run["step_ms"] - 1)
        name = METHODS[run["method"]].label
        cells = [run["model"], str(run["hosts"]), run["rate"], name, f"{run['step_ms']:.1f}", f"{prediction:.1f}"]
        lines.append("| " + " | ".join([*cells, f"{100 * errors[-1]:+.0f} %"]) + " |")
    median = statistics.median(map(abs, errors))
    return [*lines, "", f"Median error {100 * median:.1f} % of {len(points)} runs.", ""]


def predicted(run: dict, results: list[dict]) -> float | None:
    """Return the predicted milliseconds of a step; None without a profile, or for a run without a limit."""
    free = without_limit(run, results)
    if run["rate"] == UNLIMITED or free is None or run["framework"] != "pytorch":
        return None
    return 1e3 * one_method(METHODS[run["method"]], free).step(link_of(run), run["hosts"])


def link_of(run: dict) -> model.Network:
    """Return the links of a run: measured with all-reduces in the same job; for DDP, the nominal rate."""
    if METHODS[run["method"]].package == "ddp":
        return model.Network(TCP * rate(run["rate"]))
    return model.Network(**run["link"])


def one_method(method: Method, profiled: dict) -> model.Method:
    """Return a method with the profile measured in the run without a limit."""
    compute, compress, decompress = (1e-3 * profiled[f"{part}_ms"] for part in ("compute", "compress", "decompress"))
    wait = max(0.0, 1e-3 * profiled["step_ms"] - compute - compress - decompress)
    overlap = 0.0 if method.name == "micro" else OVERLAP * compute  # MiCRO selects in the whole model, after backward
    decode = decompress / profiled["hosts"]
    scatters = method.settings.get("exchange") == "reduce_scatter"
    profile = model.Profile(numels(profiled["model"]), compute, overlap, compress, decode, wait)
    if scatters:  # the decoding time does not depend on the number of ranks
        profile = dataclasses.replace(profile, decoded=1.0, decode=decompress)
    return model.Method(method.label, exchange_of(method, profiled["bytes_per_step"]), profile)


def exchange_of(method: Method, bytes_per_step: int) -> model.Exchange:
    """Return the exchange of a method."""
    if "density" not in method.settings:
        return lambda network, profile, world_size: network.all_reduce(bytes_per_step, world_size)
    if method.settings.get("exchange") == "hierarchical":
        scatters = method.settings.get("between_hosts") == "reduce_scatter"
        return hierarchical(method.settings["density"], method.settings["ranks_per_host"], scatters=scatters)
    if method.settings.get("complete"):
        return model.scattered(method.settings["density"], complete=True)
    kinds = {"micro": model.shared, "reduce_scatter": model.scattered}
    return kinds.get(method.settings.get("exchange", method.name), model.gathered)(method.settings["density"])


def plot(points: list[tuple[dict, float]], path: Path) -> None:
    """Plot every point, with a colour for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axis = figure.subplots()
    for number, (name, method) in enumerate(METHODS.items()):
        own = [(run["step_ms"], prediction) for run, prediction in points if run["method"] == name]
        if own:
            axis.scatter(*zip(*own, strict=True), label=method.label, color=f"C{number}", s=18)
    steps = [run["step_ms"] for run, _ in points]
    ends = [min(steps), max(steps)]
    axis.plot(ends, ends, color="black", linewidth=1)
    axis.fill_between(ends, [0.85 * end for end in ends], [1.15 * end for end in ends], alpha=0.15, label="15 %")
    axis.set(xlabel="measured, ms a step", ylabel="predicted, ms a step", xscale="log", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
