"""Reproduce DGS's Figures 5 and 6 and DCT's Figures 8a and 8c on slow networks.

    python benchmarks/network/asynchronous.py --rates 1gbit --workers 1 2 4 8

Figure 5: a character LSTM on 8 workers and one server, each on a separate host, with links of 1 Gbit/s. Servers'
answers have density 0.01, too. Figure 6: 5 M parameters. Workers sleep 50 ms for each gradient, because the hosts share
the cores of this machine. The speed-up is over one worker without an exchange. Figures 8a and 8c: the time of a push
relative to ASGD's, for life-spans at density 0.05, and for densities at a life-span of 1000. There, workers first push
without a limit until an element has been sent five times on average, as residuals grow at first.

Writes results/network_asynchronous.json, .md and .png, and skips runs that the file already has; the page has the runs
of this call's `--steps` and `--seconds`. The last line of output is one JSON object.
"""

import argparse
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import RESULTS, ROOT, last_json, load, save
from curves import follow
from hosts import Hosts, enter_switch, hosts
from records import UNLIMITED, WARM

OFTEN = 5  # how often an element has been sent, on average, before a run of Figure 8 is timed
WORKER = Path(__file__).resolve().parent / "push_worker.py"
FIGURES = ("curve", "speedup", "pushes_per_second", "sent")  # what a run adds to its description
METHODS = ("asgd", "gd_async", "dgc_async", "dgs")
NUMEL, STEP_SECONDS = 5_000_000, 0.05  # for Figure 6
STEPS, SECONDS = 150, 6.0  # for Figure 5, per worker; of a run for the others
WARM_UP_SECONDS = 1800  # at most, before a run of Figure 8 is timed
TASK = ["--task", "char_lstm", "--hidden", "512", "--sequence-length", "16", "--batch-size", "4"]
LENGTHS = {5: {"steps": STEPS}, 6: {"seconds": SECONDS}, 8: {"seconds": SECONDS}}
LOSS_WORKERS = 8
DCT_PLACE = {"figure": 8, "workers": 4, "servers": 1, "method": "dct_async"}
DCT = [(0.05, 1), (0.05, 10), (0.05, 100), (0.05, 1000), (0.25, 1000), (0.1, 1000), (0.02, 1000), (0.005, 1000)]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", choices=("5", "6", "8"), default=["5", "6", "8"], help="(default: all)")
    parser.add_argument(
        "--rates", nargs="+", default=["1gbit", "10gbit"], help="not of Figure 5 (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="(default: %(default)s)")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2], help="of Figure 6 (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of Figure 5 (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of other runs (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def loss_against_time(lab: Hosts, method: str, steps: int) -> dict:
    """Return the curve of a run of Figure 5."""
    options = [*TASK, "--method", method, "--steps", str(steps), "--evaluations", "15"]
    if method != "asgd":
        options += ["--pull-density", "0.01"]
    script = ROOT / "examples" / "pytorch_dgs.py"
    return {"curve": follow(lab.mpirun([sys.executable, str(script), *options]), "loss")}


def speed(lab: Hosts, run: dict, seconds: float) -> dict:
    """Return the speed-up of a run of Figure 6, or the pushes per second of a run of Figure 8."""
    options = ["--method", run["method"], "--servers", str(run["servers"]), "--numel", str(NUMEL)]
    options += ["--step-seconds", str(STEP_SECONDS), "--seconds", str(seconds)]
    if "lifespan" in run:
        options += ["--density", str(run["density"]), "--lifespan", str(run["lifespan"])]
    limit = 120 + 20 * seconds
    if run["figure"] == 6:
        figures = last_json(lab.mpirun([sys.executable, str(WORKER), *options]), timeout=limit)
        return {"speedup": STEP_SECONDS * figures["pushes_per_second"]}
    options += ["--workers", str(run["workers"]), "--first", str(run["first"])]
    lab.shape(None)
    lines = []
    with subprocess.Popen(
        lab.mpirun([sys.executable, str(WORKER), *options]), stdout=subprocess.PIPE, text=True
    ) as process:
        watch = threading.Timer(limit + WARM_UP_SECONDS, process.kill)
        watch.start()
        for line in process.stdout:
            lines.append(line.strip())
            if lines[-1] == WARM and run["rate"] != UNLIMITED:
                lab.shape(run["rate"])
        watch.cancel()
    if process.returncode != 0:
        raise RuntimeError(f"{run} failed; its output is above")
    return json.loads(lines[-1])


def asked_for(args: argparse.Namespace) -> list[dict]:
    """Return the runs, ordered by the number of hosts."""
    runs = []
    if "5" in args.figures:
        same = {"figure": 5, "rate": "1gbit", "workers": LOSS_WORKERS, "servers": 1, "steps": args.steps}
        runs += [{**same, "method": method} for method in args.methods]
    if "6" in args.figures:
        for workers, servers, rate, method in itertools.product(args.workers, args.servers, args.rates, args.methods):
            place = {"figure": 6, "rate": rate, "workers": workers, "servers": servers}
            runs.append({**place, "method": method, "seconds": args.seconds})
    if "8" in args.figures:
        for rate in args.rates:
            place = {**DCT_PLACE, "rate": rate, "seconds": args.seconds}
            runs.append({**place, "method": "asgd", "first": 1})
            for density, lifespan in DCT:
                runs.append({**place, "density": density, "lifespan": lifespan, "first": round(OFTEN / density)})
    return sorted(runs, key=lambda run: run["workers"] + run["servers"])


def write(results: list[dict], folder: Path) -> None:
    """Write the tables and the plot."""
    lines = ["# Asynchronous training on slow networks", ""]
    lines += [f"## Figure 5: loss against time, {LOSS_WORKERS} workers, 1 server, 1 Gbit/s", ""]
    lines += ["| method | seconds | over ASGD | loss at the end |", "|---|---:|---:|---:|"]
    curves = {one["method"]: one["curve"] for one in results if one["figure"] == 5}
    for method, curve in curves.items():
        over = f"{curves['asgd'][-1][0] / curve[-1][0]:.1f}" if "asgd" in curves else ""
        lines.append(f"| {method} | {curve[-1][0]:.0f} | {over} | {curve[-1][1]:.3f} |")
    lines += ["", f"## Figure 6: speed-up, {NUMEL:,} parameters, {1e3 * STEP_SECONDS:.0f} ms a gradient", ""]
    speeds = [one for one in results if one["figure"] == 6]
    counts = sorted({one["workers"] for one in speeds})
    lines += ["| rate | servers | method | " + " | ".join(f"{count} workers" for count in counts) + " |"]
    lines += ["|---|---:|---|" + "---:|" * len(counts)]
    for rate, servers, method in lines_of(speeds):
        found = {one["workers"]: one["speedup"] for one in speeds if key_of(one) == (rate, servers, method)}
        cells = [f"{found[count]:.1f}" if count in found else "" for count in counts]
        lines.append(f"| {rate} | {servers} | {method} | " + " | ".join(cells) + " |")
    lines += times_of_a_push([one for one in results if one["figure"] == 8])
    (folder / "network_asynchronous.md").write_text("\n".join([*lines, ""]))
    plot(curves, speeds, folder / "network_asynchronous.png")


def times_of_a_push(runs: list[dict]) -> list[str]:
    """Return the lines of the table of DCT's Figures 8a and 8c."""
    place = f"{DCT_PLACE['workers']} workers, 1 server, {NUMEL:,} parameters"
    lines = ["", f"## DCT's Figures 8a and 8c: time of a push over ASGD's, {place}", ""]
    lines += ["| rate | density | life-span | density of the pushes | time over ASGD's |", "|---|---:|---:|---:|---:|"]
    dense = {one["rate"]: one["pushes_per_second"] for one in runs if one["method"] == "asgd"}
    for one in runs:
        if one["method"] != "asgd" and one["rate"] in dense:
            ratio = dense[one["rate"]] / one["pushes_per_second"]
            lines.append(f"| {one['rate']} | {one['density']} | {one['lifespan']} | {one['sent']:.3f} | {ratio:.3f} |")
    return lines


def key_of(run: dict) -> tuple:
    """Return the key of the line of Figure 6 that a run belongs to."""
    return run["rate"], run["servers"], run["method"]


def lines_of(speeds: list[dict]) -> list[tuple]:
    """Return the lines of Figure 6 in order."""
    return sorted({key_of(one) for one in speeds}, key=lambda key: (key[0], key[1], METHODS.index(key[2])))


def plot(curves: dict, speeds: list[dict], path: Path) -> None:
    """Plot Figure 5, and Figure 6 with a panel for each rate and number of servers."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((rate, servers) for rate, servers, _ in lines_of(speeds)))
    figure = Figure(figsize=(4 * (1 + len(panels)), 3.4), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(panels), squeeze=False).flat
    for method, curve in curves.items():
        first.plot(*zip(*curve, strict=True), label=method, color=f"C{METHODS.index(method)}")
    first.set(title=f"loss, {LOSS_WORKERS} workers, 1gbit", xlabel="seconds", ylabel="held-out loss", xscale="log")
    for axis, (rate, servers) in zip(others, panels, strict=True):
        for method in METHODS:
            own = sorted((one["workers"], one["speedup"]) for one in speeds if key_of(one) == (rate, servers, method))
            if own:
                axis.plot(*zip(*own, strict=True), label=method, color=f"C{METHODS.index(method)}", marker="o")
        axis.axline((0, 0), slope=1, color="black", linestyle=":", linewidth=1)
        axis.set(title=f"speed-up, {servers} server{'s'[: servers > 1]}, {rate}", xlabel="workers")
    for axis in (first, *others):
        axis.grid(alpha=0.3)
        if axis.has_data():
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what is missing, and write the report."""
    args = parse_arguments()
    enter_switch()
    path = args.out / "network_asynchronous.json"
    results = [{**LENGTHS[one["figure"]], **one} for one in load(path)]  # as all were that do not say it
    known = [{key: value for key, value in one.items() if key not in FIGURES} for one in results]
    wanted = [run for run in asked_for(args) if run not in known]
    for count, runs in itertools.groupby(wanted, key=lambda run: run["workers"] + run["servers"]):
        with hosts(count) as lab:
            for run in runs:
                lab.shape(None if run["rate"] == UNLIMITED else run["rate"])
                is_loss = run["figure"] == 5
                found = loss_against_time(lab, run["method"], args.steps) if is_loss else speed(lab, run, args.seconds)
                results.append({**run, **found})
                save(path, results)
                told = "seconds, loss: {:.0f}, {:.3f}".format(*found["curve"][-1]) if is_loss else f"{found}"
                print(f"{run}: {told}", flush=True)
    chosen = [one for one in results if one.get("steps", args.steps) == args.steps]
    chosen = [one for one in chosen if one.get("seconds", args.seconds) == args.seconds]
    write(chosen, args.out)
    ends = {one["method"]: one["curve"][-1] for one in chosen if one["figure"] == 5}
    speeds = [one for one in chosen if one["figure"] != 5]
    print(json.dumps({"benchmark": "network_asynchronous", "loss_at_seconds": ends, "speedups": speeds}))


if __name__ == "__main__":
    main()
