"""Train the examples with several seeds, dense and compressed, and write the tables in benchmarks/results.

    make results      or: python benchmarks/convergence.py --ranks 4 --seeds 0 1 2

Each run is `mpirun -np RANKS python examples/...`; there may be more ranks than cores. Options that this program does
not know are passed to the examples. A file of results with other options, or of another number of ranks, is never
overwritten. The last line of output is one JSON object.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

from common import RESULTS, ROOT, last_json, missing, number, refuse_other_settings
from machine import machine

METHODS = ("dgc", "gradient_dropping", "dct", "micro", "topk", "cltk", "sidco", "random_k")


def methods(density: float, threshold: float) -> dict[str, list[str]]:
    """Return {method: options} at one density. threshold: the constant of hard_threshold."""
    rows = {f"{method} {density}": ["--method", method, "--density", str(density)] for method in METHODS}
    rows[f"topk {density}"] += ["--scope", "tensor"]  # as the others select; its default is "model"
    constant = ["--method", "hard_threshold", "--threshold", str(threshold)]
    return {"dense": ["--method", "none"], **rows, f"hard_threshold {threshold}": constant}


DIGITS = {**methods(0.01, 0.05), "dgc 0.001": ["--method", "dgc", "--density", "0.001"]}
TENSORFLOW2_DIGITS = {name: DIGITS[name] for name in ("dense", "dgc 0.01", "dgc 0.001", "gradient_dropping 0.01")}
CHAR_LSTM = {"dense": ["--method", "none"], "dgc 0.001": ["--method", "dgc", "--density", "0.001"]}
LSTM_RUN = ["--steps", "6000", "--warmup-steps", "600"]
DIGITS_RUN = ["--batch-size", "2", "--epochs", "40", "--warmup-epochs", "4"]
TRANSFORMER = {  # 6.4 M parameters, AdamW
    "dense": ["--method", "none"],
    **{
        f"dgc {density}, {exchange}": ["--method", "dgc", "--density", str(density), "--exchange", exchange]
        for density in (0.01, 0.001)
        for exchange in ("gather", "reduce_scatter")
    },
}
DROPPING = ["--method", "gradient_dropping", "--density", "0.01"]
QUANTIZED = {  # Figure 8 of Gradient Dropping
    "dense": ["--method", "none"],
    "float32": DROPPING,
    **{
        f"{values}, {level}, {granularity}": [
            *DROPPING,
            *("--values", values),
            *("--level", level),
            *("--granularity", granularity),
        ]
        for values, level, granularity in [
            ("int1", "min", "tensor"),
            ("int1", "mean", "tensor"),
            ("int1", "mean", "channel"),
            ("int2", "min", "tensor"),
            ("int2", "mean", "tensor"),
        ]
    },
}
MICRO = {  # k elements change in a step, with top-k on 4 ranks up to 4 k
    f"{method} {density}, rate {rate}": ["--method", method, "--density", str(density), "--lr", str(rate), *scope]
    for method, density, rates, scope in [
        ("topk", 0.01, (0.5, 2.0), ("--scope", "tensor")),
        ("micro", 0.01, (0.5, 2.0), ()),
        ("micro", 0.04, (1.0,), ()),
    ]
    for rate in rates
}
EXPERIMENTS = {  # {name: (script, options of all runs, metric, options of each method)}
    "digits": ("pytorch_digits.py", DIGITS_RUN, "accuracy", DIGITS),
    "tensorflow2_digits": ("tensorflow2_digits.py", DIGITS_RUN, "accuracy", TENSORFLOW2_DIGITS),
    "char_lstm": ("pytorch_char_lstm.py", ["--steps", "48000", "--warmup-steps", "4800"], "perplexity", CHAR_LSTM),
    "transformer": ("pytorch_transformer.py", ["--steps", "600", "--batch-size", "2"], "loss", TRANSFORMER),
    "quantized_digits": (
        "pytorch_digits.py",
        ["--batch-size", "2", "--epochs", "10", "--warmup-epochs", "1"],
        "accuracy",
        QUANTIZED,
    ),
    "quantized_char_lstm": (
        "pytorch_char_lstm.py",
        ["--steps", "1500", "--warmup-steps", "150"],
        "perplexity",
        QUANTIZED,
    ),
    "micro_char_lstm": ("pytorch_char_lstm.py", LSTM_RUN, "perplexity", MICRO),
    "char_lstm_methods": ("pytorch_char_lstm.py", LSTM_RUN, "perplexity", methods(0.01, 0.03)),
}


def train(script: str, options: list[str], ranks: int, seed: int, extra: list[str]) -> dict:
    """Run one example and return its JSON line."""
    command = ["mpirun", "-np", str(ranks), "--oversubscribe", sys.executable, str(ROOT / "examples" / script)]
    command += [*options, "--seed", str(seed), "--plot", "", "--quiet", *extra]
    return last_json(command)


def run(name: str, ranks: int, seeds: list[int], extra: list[str], out: Path, resume: bool) -> list[dict]:
    """Run every method of an experiment with every seed; print and write each result."""
    script, common, metric, methods = EXPERIMENTS[name]
    path = out / f"convergence_{name}.json"
    before = json.loads(path.read_text()) if path.exists() else None
    if before is not None:
        found = {"ranks": before["runs"][0]["world_size"], "options": before.get("options", [])}
        refuse_other_settings(path, found, {"ranks": ranks, "options": extra})
    results = before["runs"] if before and resume else []
    for label, seed in missing(itertools.product(methods, seeds), results, ("label", "seed")):
        result = train(script, [*common, *methods[label]], ranks, seed, extra)
        results.append({"label": label, **result})
        found = f"{metric} {number(result[metric]):.3f}, ratio {result['ratio']:.0f}"
        print(f"{name}: {label}, seed {seed}: {found}", flush=True)
        write(name, results, ranks, extra, out)
    return results


def write(name: str, results: list[dict], ranks: int, extra: list[str], out: Path) -> None:
    """Write the results so far to one JSON and one Markdown file."""
    where = f"{ranks} ranks; {machine()}"
    summary = {"where": where, "options": extra, "runs": results}
    (out / f"convergence_{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
    (out / f"convergence_{name}.md").write_text(f"{table(name, results)}\n\n{where}\n")
    if all("curve" in row for row in results):
        draw(name, results, out)


def draw(name: str, results: list[dict], out: Path) -> None:
    """Draw the held-out loss of each run over its steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for row in results:
        steps, losses = zip(*row["curve"], strict=True)
        axis.plot(steps, list(map(number, losses)), marker=".", label=f"{row['label']}, seed {row['seed']}")
    axis.set(title=f"{name}, {results[0]['world_size']} ranks", xlabel="step", ylabel="held-out loss, nats")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(out / f"convergence_{name}.png", dpi=120)


def table(name: str, results: list[dict]) -> str:
    """Return a Markdown table: each method's metric, and the means over the seeds of its density and ratio of bytes."""
    metric = EXPERIMENTS[name][2]
    lines = [f"| {name} | {metric}, mean | each seed | density, mean | ratio of all steps, mean |"]
    lines += ["|---|---|---|---|---|"]
    for label in EXPERIMENTS[name][3]:
        rows = [row for row in results if row["label"] == label]
        if not rows:
            continue
        values = [number(row[metric]) for row in rows]
        density, ratio = (statistics.mean(row[kind] for row in rows) for kind in ("density", "ratio"))
        cells = [label, f"{statistics.mean(values):.3f}", ", ".join(f"{value:.3f}" for value in values)]
        lines.append(f"| {' | '.join([*cells, f'{density:.5f}', f'{ratio:.0f}'])} |")
    return "\n".join(lines)


def main() -> None:
    """Run the experiments; write one JSON and one Markdown file each; print all tables and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--resume", action="store_true", help="keep the runs that the results have already")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments, extra = parser.parse_known_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    summary = {}
    for name in arguments.experiments:
        results = run(name, arguments.ranks, arguments.seeds, extra, arguments.out, arguments.resume)
        print(f"\n{table(name, results)}\n")
        summary[name] = [{key: row[key] for key in ("label", "seed", "ratio")} for row in results]
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
