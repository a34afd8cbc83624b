"""Compare the step times that `hvd_sparse plan` predicts with those that `run.py` measured in PyTorch under Horovod.

    python benchmarks/network/planned.py

The command is told the compute time of dense training without a limit, and the job's bandwidth and latency; the time to
compress is measured on this machine. `validation.py` takes all of a rank's times from the job instead. Writes
results/network_planned.json.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import RESULTS, load, save
from models import numels
from records import UNLIMITED, without_limit

from hvd_sparse import plan
from hvd_sparse.performance_model import CYCLE, Method, Network

NAMES = {"dense": "dense", "fp16": "fp16", "dgc": "DGC 0.001", "dgc_0.01": "DGC 0.01", "micro": "MiCRO 0.01"}


@functools.cache
def planned(parameters: int, compute_ms: float) -> dict[str, Method]:
    """Return the methods that the command compares, by name."""
    args = argparse.Namespace(parameters=parameters, compute_ms=compute_ms, overlap=0.5, framework=None, host="horovod")
    return {one.method.name: one.method for one in plan.candidates(args)}


def network_of(run: dict) -> Network:
    """Return the network that a job measured. Before all-gathers were timed, the latency had a share of a cycle."""
    network = Network(**run["link"])
    if "gather_cost" in run["link"]:
        return network
    return dataclasses.replace(network, latency=max(0.0, network.latency - CYCLE / (2 * (run["hosts"] - 1))))


def errors(runs: list[dict]) -> list[dict]:
    """Return model, hosts, rate, method, milliseconds measured and predicted, and the error of each run."""
    found = []
    for run in runs:
        free = without_limit({**run, "method": "dense"}, runs)
        if run["framework"] != "pytorch" or run["rate"] == UNLIMITED or run["method"] not in NAMES or free is None:
            continue
        method = planned(sum(numels(run["model"])), free["compute_ms"])[NAMES[run["method"]]]
        row = {key: run[key] for key in ("model", "hosts", "rate", "method", "step_ms")}
        row["predicted_ms"] = 1e3 * method.step(network_of(run), run["hosts"])
        found.append(row | {"error": row["predicted_ms"] / row["step_ms"] - 1})
    return found


def main() -> None:
    """Print and save each run, and print median and largest error."""
    rows = errors(load(RESULTS / "network.json"))
    save(RESULTS / "network_planned.json", rows)
    for row in rows:
        print("  ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    sizes = [abs(row["error"]) for row in rows]
    print(f"{len(rows)} runs: median error {statistics.median(sizes):.0%}, largest {max(sizes):.0%}")


if __name__ == "__main__":
    main()
