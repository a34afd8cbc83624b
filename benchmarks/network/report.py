"""Writes tables and plots of the measurements of `run.py`."""

from collections.abc import Callable, Iterable
from pathlib import Path

from methods import METHODS
from records import UNLIMITED, without_limit
from validation import validate

from hvd_sparse.plan import rate as bits_per_second

SHOWN_RATE, SHOWN_HOSTS, SHOWN_BATCH = "1gbit", 4, 8  # for plots over the number of hosts, and over the models
SHOWN_METHODS = ("fp16", "ddp", "ddp_fp16", "powersgd", "dgc_0.01", "dgc", "ddp_dgc_0.01", "ddp_dgc")
OURS = {"dgc_0.01": "tab:orange", "dgc": "tab:red", "ddp_dgc_0.01": "tab:cyan", "ddp_dgc": "tab:blue"}  # their colours
MODEL_NAMES = {
    "mlp10": "MLP\n10.5 M parameters",
    "mlp38": "MLP\n37.8 M",
    "lstm": "LSTM\n19.8 M",
    "resnet50": "ResNet-50's shapes\n25.6 M",
}
NOTE = (
    "Samples per second of one rank; in brackets, the share of the same job's speed without a limit, where both were",
    "measured in one session. Columns of a table may be of different sessions; the machine's speed may have changed",
    "between them.",
)
GROUP = ("framework", "model", "hosts", "batch_size")  # the runs of a table
UNITS = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}
COLUMNS = 2  # of panels


def write(results: list[dict], chosen: list[dict], folder: Path) -> list[dict]:
    """Write network.md, network.png and the plots _speedup, _hosts and _model.

    Returns the rows of the chosen runs, each with its share of the speed without a limit.
    """
    rows = [with_share(one, results) for one in chosen]
    text = ["# Training on slow networks", "", *NOTE, ""]
    groups = dict.fromkeys(tuple(one[key] for key in GROUP) for one in results)
    for group in groups:
        text += table(group, results)
    text += validate(results, folder)
    (folder / "network.md").write_text("\n".join(text))
    plot_rates([group for group in groups if rates_of(group, results)[1:]], results, folder / "network.png")
    shown = [one for one in results if one["batch_size"] == SHOWN_BATCH]
    plot_hosts(shown, folder / "network_hosts.png")
    plot_speedups(shown, folder / "network_speedup.png")
    return rows


def with_share(run: dict, results: list[dict]) -> dict:
    """Return a run with its speed relative to the same job on unlimited links; None if that was not measured."""
    whole = without_limit(run, results)
    return {**run, "share": None if whole is None else run["samples_per_second"] / whole["samples_per_second"]}


def table(group: tuple, results: list[dict]) -> list[str]:
    """Return a Markdown table: one row for each method, one column for each rate."""
    framework, model, count, batch = group
    own = [with_share(one, results) for one in of_group(group, results)]
    rates = rates_of(group, results)
    lines = [f"## {model}, {count} hosts, {framework}, batch {batch} of a rank", ""]
    lines += ["| method | " + " | ".join(map(rate_label, rates)) + " |", "|---|" + "---:|" * len(rates)]
    for method in METHODS:
        cells = []
        for rate in rates:
            found = [one for one in own if one["method"] == method and one["rate"] == rate]
            cells.append(cell(found[0]) if found else "")
        if any(cells):
            lines.append(f"| {METHODS[method].label} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def cell(run: dict) -> str:
    """Return samples per second, and the share of the speed without a limit."""
    share = "" if run["share"] is None or run["rate"] == UNLIMITED else f" ({100 * run['share']:.0f} %)"
    return f"{run['samples_per_second']:.1f}{share}"


def point_of(run: dict, *more: str) -> tuple:
    """Return the point of the grid that a run belongs to."""
    return tuple(run[key] for key in ("framework", "model", "hosts", "rate", *more))


def of_group(group: tuple, results: list[dict]) -> list[dict]:
    """Return the runs of a framework, a model, a number of hosts, and a batch size."""
    return [one for one in results if tuple(one[key] for key in GROUP) == group]


def rates_of(group: tuple, results: list[dict]) -> list[str]:
    """Return the rates of a group in ascending order."""
    return sorted({one["rate"] for one in of_group(group, results)}, key=order)


def order(rate: str) -> tuple[bool, float]:
    """Return the sort key of a rate. No limit comes last."""
    return (rate == UNLIMITED, 0.0 if rate == UNLIMITED else bits_per_second(rate))


def rate_label(rate: str) -> str:
    """Return the label of a rate."""
    return "no limit" if rate == UNLIMITED else f"{rate[:-4]} {UNITS[rate[-4:]]}"


def plot_rates(groups: list[tuple], results: list[dict], path: Path) -> None:
    """Plot samples per second against the rate of the links, with a panel for each group."""
    panels = []
    for group in groups:
        rates, (framework, model, count, batch) = rates_of(group, results), group
        runs = [{**one, "x": rates.index(one["rate"])} for one in of_group(group, results)]
        title = f"{model}, {count} hosts, {framework}, batch {batch}"
        panels.append((title, [rate_label(rate) for rate in rates], runs))
    draw(panels, "samples a second, a rank", lambda run: run["samples_per_second"], path)


def plot_hosts(results: list[dict], path: Path) -> None:
    """Plot samples per second of all hosts together against the number of hosts, with a panel for each model."""
    panels = []
    for framework, model in dict.fromkeys((one["framework"], one["model"]) for one in results):
        own = [one for one in results if (one["framework"], one["model"]) == (framework, model)]
        runs = [one for one in own if one["rate"] == SHOWN_RATE]
        counts = sorted({one["hosts"] for one in runs})
        if len(counts) > 1:
            runs = [{**one, "x": counts.index(one["hosts"])} for one in runs]
            panels.append((f"{model}, {rate_label(SHOWN_RATE)}, {framework}", [f"{n} hosts" for n in counts], runs))
    draw(panels, "samples a second, all ranks", lambda run: run["samples_per_second"] * run["hosts"], path)


def draw(panels: list[tuple], label: str, height: Callable[[dict], float], path: Path) -> None:
    """Draw panels with a line for each method. A panel: title, tick labels, and runs with their x coordinates."""
    from matplotlib.figure import Figure

    if not panels:
        return
    rows, columns = -(-len(panels) // COLUMNS), min(COLUMNS, len(panels))
    figure = Figure(figsize=(5.5 * columns, 3.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    for axis, (title, ticks, runs) in zip(axes, panels, strict=False):
        for number, (method, spec) in enumerate(METHODS.items()):
            own: Iterable[dict] = sorted((run for run in runs if run["method"] == method), key=lambda run: run["x"])
            points = [(run["x"], height(run)) for run in own]
            if points and method != "dgc_measured":
                ours = spec.is_ours
                style = {"marker": "o", "linestyle": "-" if ours else "--", "linewidth": 2 if ours else 1}
                axis.plot(*zip(*points, strict=True), label=spec.label, color=f"C{number}", **style)
        axis.set(title=title, ylabel=label, yscale="log")
        axis.set_xticks(range(len(ticks)), ticks)
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def plot_speedups(results: list[dict], path: Path) -> None:
    """Plot the speed-up of the methods over Horovod's dense training: a group of bars for each model."""
    from matplotlib.figure import Figure

    dense = {point_of(one): one.get("session") for one in results if one["method"] == "dense"}
    alike = [one for one in results if point_of(one) in dense and one.get("session") == dense[point_of(one)]]
    speeds = {point_of(one, "method"): one["samples_per_second"] for one in alike}
    wanted = [("pytorch", model, SHOWN_HOSTS, SHOWN_RATE) for model in MODEL_NAMES]
    points = [point for point in wanted if (*point, "dense") in speeds]
    if not points:
        return
    figure = Figure(figsize=(2 + 1.7 * len(points), 3.4), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(SHOWN_METHODS)
    for number, method in enumerate(SHOWN_METHODS):
        found = [(place, point) for place, point in enumerate(points) if (*point, method) in speeds]
        heights = [speeds[(*point, method)] / speeds[(*point, "dense")] for _, point in found]
        color = OURS.get(method, str(0.85 - 0.15 * number))
        places = [place - 0.4 + width * (number + 0.5) for place, _ in found]
        bars = axis.bar(places, heights, width, label=METHODS[method].label, color=color)
        if method in OURS:
            axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.margins(y=0.1)
    axis.axhline(1, color="black", linewidth=1, linestyle=":")
    axis.set_xticks(range(len(points)), [MODEL_NAMES[model] for _, model, _, _ in points])
    axis.set_ylabel("times as fast as Horovod, dense")
    axis.set_title(f"{SHOWN_HOSTS} hosts, {rate_label(SHOWN_RATE)}", fontsize=10)
    figure.legend(fontsize=8, ncols=4, loc="outside upper center")
    figure.savefig(path, dpi=150)
