"""Plots of the examples' results."""

import sys


def plot_curves(rows, x, panels, title, path):
    """Draw one panel for each list of keys in `panels` against key `x` and save the figure to `path`."""
    save_plot(lambda: _draw(rows, x, panels, title), path)


def save_plot(draw, path):
    """Save the figure that `draw()` returns.

    A figure that cannot be drawn or saved is no reason to lose the results of a run: the error is printed.
    """
    try:
        draw().savefig(path, dpi=120)
    except (ImportError, OSError, ValueError) as error:  # ValueError: matplotlib cannot write this kind of file
        print(f"no plot in {path}: {error}", file=sys.stderr)


def _draw(rows, x, panels, title):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    for axis, keys in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for key in keys:
            axis.plot([row[x] for row in rows], [row[key] for row in rows], marker=".", label=key.replace("_", " "))
        axis.set_xlabel(x)
        axis.set_ylabel(" / ".join(keys).replace("_", " "))
        axis.grid(alpha=0.3)
        if keys == ["bytes_per_step"] and rows[-1]["bytes_per_step"]:
            axis.set_yscale("log")
        axis.legend()
    figure.suptitle(title)
    return figure
