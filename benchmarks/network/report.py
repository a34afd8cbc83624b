"""Tables and a plot of what `run.py` measured."""

from pathlib import Path

from methods import METHODS

UNLIMITED = "none"


def write(results: list[dict], chosen: list[dict], folder: Path) -> list[dict]:
    """Write network.md and network.png; return the rows of what was chosen, with shares of the unlimited speed."""
    rows = [with_share(one, results) for one in chosen]
    text = ["# Training on slow networks", ""]
    groups = dict.fromkeys((one["framework"], one["model"], one["hosts"]) for one in results)
    for group in groups:
        text += table(group, results)
    (folder / "network.md").write_text("\n".join(text))
    return rows


def with_share(run: dict, results: list[dict]) -> dict:
    """Return a run with its speed over that of the same job on unlimited links, None where that was not measured."""
    same = ("framework", "model", "hosts", "method")
    whole = [one for one in results if one["rate"] == UNLIMITED and all(one[key] == run[key] for key in same)]
    share = run["samples_per_second"] / whole[0]["samples_per_second"] if whole else None
    return {**run, "share": share}


def table(group: tuple, results: list[dict]) -> list[str]:
    """Return a Markdown table: a row for each method, a column for each rate."""
    framework, model, count = group
    own = [with_share(one, results) for one in results if (one["framework"], one["model"], one["hosts"]) == group]
    rates = sorted({one["rate"] for one in own}, key=order)
    lines = [f"## {model}, {count} hosts, {framework}", ""]
    lines += ["| method | " + " | ".join(rates) + " |", "|---|" + "---:|" * len(rates)]
    for method in METHODS:
        cells = []
        for rate in rates:
            found = [one for one in own if one["method"] == method and one["rate"] == rate]
            cells.append(cell(found[0]) if found else "")
        if any(cells):
            lines.append(f"| {METHODS[method].label} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def cell(run: dict) -> str:
    """Return samples a second, and the share of the unlimited speed."""
    share = "" if run["share"] is None or run["rate"] == UNLIMITED else f" ({100 * run['share']:.0f} %)"
    return f"{run['samples_per_second']:.1f}{share}"


def order(rate: str) -> tuple[bool, float]:
    """Return what rates are sorted by: none comes last."""
    factors = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return (rate == UNLIMITED, next((float(rate[:-4]) * f for unit, f in factors.items() if rate.endswith(unit)), 0.0))
