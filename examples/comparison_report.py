"""The report of compare_methods.py: a table in Markdown, every step in CSV, six plots, one JSON object."""

import csv
import os
import platform

import numpy as np
import plots
import reporting

COLUMNS = {  # columns of the table: heading and format
    "accuracy": ("accuracy, %", "{:.2f}"),
    "loss": ("test loss", "{:.4f}"),
    "sent": ("sent a rank", "{:.5f}"),
    "achieved": ("achieved density, mean", "{:.5f}"),
    "achieved_last": ("last", "{:.5f}"),
    "build_up": ("build-up", "{:.2f}"),
    "local_error": ("local error, last", "{:.3f}"),
    "bytes_out": ("bytes out a step", "{:,.0f}"),
    "bytes_in": ("bytes in a step", "{:,.0f}"),
    "select": ("select, ms", "{:.2f}"),
    "exchange": ("exchange, ms", "{:.2f}"),
    "apply": ("apply, ms", "{:.2f}"),
    "seconds": ("step, ms", "{:.2f}"),
}
PARTS = 150  # points of a curve
NOTES = f"""`sent a rank` is the part of the elements that a rank sends, mean over ranks and steps; `achieved density`
what the sum over all ranks holds, so the build-up, one over the other, is how much further the ranks' choices spread.
Tensors below {reporting.MIN_NUMEL} elements are sent dense and count in neither; nor do zeros that were sent. `local
error` is the L2 norm of rank 0's residual. `exchange` is the time that rank 0 waits for the others, of whom some may be
slower, and for the collectives; `select` and `apply` are what the compressor itself takes. Times are medians. A graph's
operations run side by side, so that TensorFlow's steps are not split."""


def summary(rows, epochs):
    """Return one row of the table."""
    column = {name: [row[name] for row in rows if row[name] is not None] for name in rows[0] if name != "method"}
    means = {name: float(np.mean(column[name])) for name in ("sent", "achieved", "bytes_out", "bytes_in")}
    means["build_up"] = means["achieved"] / means["sent"]
    times = {
        name: 1000 * float(np.median(column[name])) if column[name] else None
        for name in ("select", "exchange", "apply", "seconds")
    }
    last = {"achieved_last": column["achieved"][-1], "local_error": column["local_error"][-1]}
    return {**epochs[-1], **means, **last, **times}


def table(results):
    """Return the table in Markdown."""
    lines = [
        "| method | " + " | ".join(title for title, _ in COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for label, (rows, epochs) in results.items():
        row = summary(rows, epochs)
        cells = ["-" if row[name] is None else form.format(row[name]) for name, (_, form) in COLUMNS.items()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def title(args):
    """Return a description of the run."""
    steps = args.epochs * args.steps_per_epoch
    return (
        f"digits, {args.framework}, {args.size} ranks, density {args.density:g}, {steps} steps of batch "
        f"{args.batch_size} a rank, seed {args.seed}"
    )


def write(results, args):
    """Write comparison.md, steps.csv and comparison.png; print the table."""
    args.out.mkdir(parents=True, exist_ok=True)
    text = table(results)
    where = f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}"
    (args.out / "comparison.md").write_text(
        f"# {title(args)}\n\n{text}\n\n{NOTES}\n\n{where}\n\n![plots](comparison.png)\n"
    )
    with (args.out / "steps.csv").open("w", newline="") as file:
        rows = [row for rows, _ in results.values() for row in rows]
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if args.verbose:
        print(f"\n{title(args)}\n\n{text}\n\nwritten: {args.out}/comparison.md, steps.csv")
    plots.save_plot(lambda: draw(results, args), args.out / "comparison.png")


def draw(results, args):
    """Draw accuracy, density, build-up, local error, bytes and time; return the figure."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9), layout="constrained")
    axes = figure.subplots(2, 3)
    colours = {label: colormaps["tab20" if len(results) > 10 else "tab10"](i) for i, label in enumerate(results)}
    for label, (rows, epochs) in results.items():
        style = {"color": colours[label], "label": label, "linewidth": 1.2}
        axes[0, 0].plot(range(1, len(epochs) + 1), [epoch["accuracy"] for epoch in epochs], marker=".", **style)
        for axis, name in ((axes[0, 1], "achieved"), (axes[0, 2], "build_up"), (axes[1, 0], "local_error")):
            if name == "achieved" or label not in ("none", "fp16"):
                axis.plot(*smooth([row[name] for row in rows]), **style)
    axes[0, 1].axhline(args.density, color="black", linestyle=":", linewidth=1)
    axes[0, 1].set_yscale("log")
    for axis, name, unit in (
        (axes[0, 0], "test accuracy, %", "epoch"),
        (axes[0, 1], "achieved density", "step"),
        (axes[0, 2], "build-up: union / sent a rank", "step"),
        (axes[1, 0], "local error", "step"),
    ):
        axis.set(title=name, xlabel=unit)
        axis.grid(alpha=0.3)
    draw_bars(axes[1, 1], results, {"bytes_out": "out", "bytes_in": "in"}, "bytes a step", stacked=False)
    split = {"select": "select", "exchange": "exchange", "apply": "apply"}
    if all(summary(*result)["select"] is None for result in results.values()):
        split = {"seconds": "whole step"}
    draw_bars(axes[1, 2], results, split, "time a step, ms", stacked=True)
    axes[0, 0].legend(fontsize=7, ncols=2)
    figure.suptitle(title(args))
    return figure


def smooth(values):
    """Return steps and means of up to PARTS parts of a series."""
    chunks = np.array_split(np.arange(len(values)), min(PARTS, len(values)))
    return [chunk.mean() for chunk in chunks], [float(np.mean([values[i] for i in chunk])) for chunk in chunks]


def draw_bars(axis, results, columns, name, stacked):
    """Draw a bar, or a group of bars, a method."""
    summaries = [summary(*result) for result in results.values()]
    places, bottom = np.arange(len(results)), np.zeros(len(results))
    for i, (column, label) in enumerate(columns.items()):
        values = np.array([row[column] or 0.0 for row in summaries])
        if stacked:
            axis.bar(places, values, bottom=bottom, label=label)
            bottom += values
        else:
            axis.bar(places + 0.4 * i - 0.2, values, width=0.4, label=label)
    axis.set_xticks(places, list(results), rotation=60, ha="right", fontsize=8)
    axis.set(title=name, yscale="linear" if stacked else "log")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, axis="y")


def as_json(results, args):
    """Return settings and table as one object."""
    settings = {name: getattr(args, name) for name in ("framework", "density", "epochs", "batch_size", "lr", "seed")}
    methods = {label: summary(rows, epochs) for label, (rows, epochs) in results.items()}
    return {"example": "compare_methods", **settings, "world_size": args.size, "methods": methods}
