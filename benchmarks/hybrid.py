"""Compare hybrid training (pipeline and data parallelism) with dense training: the loss over seeds, and bytes per link.

    make results-hybrid      or: python benchmarks/hybrid.py --seeds 0 1 2

Runs `examples/pytorch_dct_hybrid.py` under mpirun: replicas of a click model in stages, as in Tables 1 to 3 of "Dynamic
Communication Thresholding". Writes results/hybrid.{json,md}, and skips runs that the file already has. Results of
another number of steps are never overwritten. The last line of output is one JSON object.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from common import RESULTS, ROOT, last_json, missing, number, refuse_other_settings
from machine import machine
from tqdm import tqdm

EXAMPLE = ROOT / "examples" / "pytorch_dct_hybrid.py"
RUNS = {  # {name: (stages, density of activations, density of gradients)}; each has two replicas
    "dense": (2, 1.0, 1.0),
    "activations 0.05": (2, 0.05, 1.0),
    "gradients 0.05": (2, 1.0, 0.05),
    "both 0.05": (2, 0.05, 0.05),
    "three stages, dense": (3, 1.0, 1.0),
    "three stages, both 0.1": (3, 0.1, 0.1),
}
DENSE = {2: "dense", 3: "three stages, dense"}
RATIOS = ("forward_ratio", "backward_ratio", "dp_ratio")


def run(name: str, seed: int, steps: int) -> dict:
    """Run the example once; return its JSON line."""
    stages, density, dp_density = RUNS[name]
    options = {"stages": stages, "density": density, "dp-density": dp_density, "seed": seed, "steps": steps}
    switches = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    command = ["mpirun", "-np", str(2 * stages), "--oversubscribe", sys.executable, str(EXAMPLE), "--quiet", *switches]
    return {"name": name, **last_json(command)}


def table(results: list[dict]) -> str:
    """Return a Markdown table: one row for each setting, means over seeds, and each seed's difference from dense."""
    lines = [
        "| | test loss | against dense, % | each seed, % | accuracy, % | ratio forward | backward | replicas |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    losses = {(one["name"], one["seed"]): one["loss"] for one in results}
    for name, (stages, *_) in RUNS.items():
        runs = [one for one in results if one["name"] == name]
        if not runs:
            continue
        dense = [losses.get((DENSE[stages], one["seed"])) for one in runs]
        each = [100.0 * (number(one["loss"]) / base - 1.0) for one, base in zip(runs, dense, strict=True) if base]
        mean = {key: statistics.mean(number(one[key]) for one in runs) for key in ("loss", "accuracy", *RATIOS)}
        difference = f"{statistics.mean(each):+.2f} | {', '.join(f'{value:+.2f}' for value in each)}" if each else " | "
        lines.append(
            f"| {name} | {mean['loss']:.4f} | {difference} | {mean['accuracy']:.2f} | "
            + " | ".join(f"{mean[ratio]:.1f}" for ratio in RATIOS)
            + " |"
        )
    return "\n".join([*lines, "", *links(results)])


def links(results: list[dict]) -> list[str]:
    """Return the lines of a table with the MB sent on every link, for the first seed."""
    lines = ["| | stage | replica | forward, MB | backward, MB | to replicas, MB |", "|---|---:|---:|---:|---:|---:|"]
    for one in results:
        if one["seed"] != results[0]["seed"]:
            continue
        for link in one["links"]:
            sent = " | ".join(f"{link[way]['sent_bytes'] / 1e6:.2f}" for way in ("forward", "backward", "replicas"))
            lines.append(f"| {one['name']} | {link['stage']} | {link['replica']} | {sent} |")
    return lines


def write(results: list[dict], steps: int, out: Path) -> str:
    """Write runs and table; return the table."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "hybrid.json").write_text(json.dumps({"steps": steps, "machine": machine(), "runs": results}) + "\n")
    text = table(results)
    (out / "hybrid.md").write_text(f"{text}\n")
    return text


def main() -> None:
    """Run what is missing, and write the results after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="(default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    file = args.out / "hybrid.json"
    before = json.loads(file.read_text()) if file.exists() else {"steps": args.steps, "runs": []}
    refuse_other_settings(file, {"steps": before["steps"]}, {"steps": args.steps})
    results = before["runs"]
    wanted = [(name, seed) for seed in args.seeds for name in args.runs]
    for name, seed in tqdm(missing(wanted, results, ("name", "seed")), unit="run"):
        results.append(run(name, seed, args.steps))
        write(results, args.steps, args.out)
    print(write(results, args.steps, args.out))
    print(json.dumps({"benchmark": "hybrid", "steps": args.steps, "runs": len(results)}))


if __name__ == "__main__":
    main()
