"""Compare dense_fallback="measured" with both of its alternatives on slow networks; write the table.

    python benchmarks/network/measured.py --rates 100mbit 1gbit 10gbit none --hosts 2 4 8

Uses the hosts of `run.py`. The differences of interest, about 3 %, are smaller than the drift of machines. So all three
methods take turns of a few steps in one job, and each turn is compared with the better alternative in the same round.
Writes results/network_measured.json and .md, and skips points that the file already has. The last line of output is one
JSON object.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import RESULTS, load, missing, save
from hosts import enter_switch, hosts
from methods import FRAMEWORKS, MODELS
from records import UNLIMITED
from report import rate_label
from run import measure

METHODS = ("dense", "dgc", "dgc_measured")
KEYS = ("framework", "model", "hosts", "rate", "batch_size")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4], help="(default: %(default)s)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit", UNLIMITED], help="of the links")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp10"], help="(default: %(default)s)")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="pytorch", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="of a rank (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each method (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of turns (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def over_the_better(point: dict) -> float:
    """Return the speed relative to the better alternative: the median over the rounds."""
    better = min(("dense", "dgc"), key=lambda method: statistics.median(point["seconds"][method]))
    rounds = zip(point["seconds"][better], point["seconds"]["dgc_measured"], strict=True)
    return statistics.median(one / measured for one, measured in rounds)


def table(points: list[dict]) -> list[str]:
    """Return the lines of a Markdown table with the median milliseconds of a step."""
    lines = ["| framework | model | hosts | rate | Horovod, ms | DGC 0.001, ms | measured, ms | over the better |"]
    lines += ["|---|---|---:|---|---:|---:|---:|---:|"]
    for point in points:
        medians = [f"{1e3 * statistics.median(point['seconds'][method]):.1f}" for method in METHODS]
        cells = [point["framework"], point["model"], str(point["hosts"]), rate_label(point["rate"]), *medians]
        lines.append("| " + " | ".join([*cells, f"{over_the_better(point):.2f}"]) + " |")
    return [*lines, ""]


def main() -> None:
    """Measure what is missing, and write the report."""
    args = parse_arguments()
    enter_switch()
    path = args.out / "network_measured.json"
    points = load(path)
    for count in args.hosts:
        wanted = itertools.product([args.framework], args.models, [count], args.rates, [args.batch_size])
        with hosts(count) as lab:
            for one in missing(wanted, points, KEYS):
                point = dict(zip(KEYS, one, strict=True))
                lab.shape(None if point["rate"] == UNLIMITED else point["rate"])
                turns = {one["method"]: one["seconds"] for one in measure(lab, point, METHODS, args, ["--in-turns"])}
                points.append({**point, "seconds": turns})
                save(path, points)
                print(f"{', '.join(map(str, point.values()))}: {over_the_better(points[-1]):.3f}", flush=True)
    title = ['# dense_fallback="measured"', "", "Over the better of the two ways that it chooses from, in turns.", ""]
    (args.out / "network_measured.md").write_text("\n".join([*title, *table(points)]))
    print(json.dumps({"results": [{**point, "over_the_better": over_the_better(point)} for point in points]}))


if __name__ == "__main__":
    main()
