"""The main job: train a digits example under horovodrun, dense and with DGC, and put both side by side."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import reporting

from hvd_sparse.performance_model import Network

ROOT = Path(__file__).resolve().parent.parent
# What horovodrun puts before each piece of output: job and rank under MPI, the rank alone under Gloo.
TAG = re.compile(r"\[(?:\d+,)?(\d+)\]<(stdout|stderr|stddiag)>:")
# TensorFlow describes the machine whenever it is imported, as horovodrun and horovod.torch do where it is installed;
# 2.21 does so whatever TF_CPP_MIN_LOG_LEVEL says. Warnings and errors are shown.
START_UP = re.compile(
    r"I\d{4} [\d:.]+ +\d+ \S+\.cc:\d+\] "
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|To enable the following instructions: .*, in other operations, rebuild TensorFlow with "
)
EXAMPLES = {
    "pytorch": "pytorch_digits.py",
    "tensorflow": "tensorflow2_digits.py",
    "keras": "tensorflow2_keras_digits.py",
}
NETWORKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9}
COLUMNS = ("method", "accuracy", "loss", "density", "dense_bytes", "payload_bytes", "ratio", "seconds")


def untagged(output: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (rank, stream, line) of what horovodrun prints, tags removed and each line whole; "" for its own lines.

    A tag stands wherever a piece of output begins, which may be in the middle of a line: behind it, another rank's
    piece can come first.
    """
    begun = {}
    for text in output:
        first, *pieces = TAG.split(text)
        pieces = ["", "", first, *pieces] if first else pieces
        for rank, stream, piece in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            source = (rank, stream)
            begun[source] = begun.get(source, "") + piece
            if piece.endswith("\n"):
                yield *source, begun.pop(source).rstrip("\n")
    for source, line in begun.items():
        yield *source, line


def shown(rank: str, line: str) -> str:
    """Return a line as it is shown: rank 0 speaks for all, so that only the others' lines say whose they are."""
    return line if rank in ("", "0") else f"[rank {rank}] {line}"


def train(example: str, method: str, ranks: int, epochs: int, options: list[str]) -> dict:
    """Run an example on `ranks` processes; show what it prints, and return its last line, a JSON object.

    The ranks' output passes through horovodrun's pipes, so none of them sees a terminal: the bar is drawn here.
    """
    command = ["horovodrun", "-np", str(ranks), sys.executable, str(ROOT / "examples" / example)]
    command += ["--method", method, "--epochs", str(epochs), *options]
    print("\n$ " + " ".join(command).replace(f"{ROOT}/", ""), flush=True)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    result = None
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        ) as process,
        tqdm(total=epochs, desc=method, unit="epoch", leave=False, disable=not sys.stderr.isatty()) as bar,
    ):
        for rank, stream, line in untagged(process.stdout):
            if stream == "stdout" and line.startswith("{") and line.endswith("}"):
                result = json.loads(line)
            elif not START_UP.match(line):
                bar.write(shown(rank, line) + "\n", sys.stdout if stream == "stdout" else sys.stderr, end="")
                sys.stdout.flush()
            if stream == "stdout" and line.split()[:1] == [str(bar.n + 1)]:  # a row of the table: an epoch has ended
                bar.update()
    if process.returncode != 0 or result is None:
        sys.exit(f"the example failed with exit code {process.returncode}; its output is above")
    return result


def without_compression(options: list[str]) -> list[str]:
    """Return the options of an example without those of a compressor, which dense training refuses."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reporting.add_compression(parser)
    return parser.parse_known_args(options)[1]


def table(results: list[dict]) -> str:
    """Return the results side by side, a column a run."""
    rows = [[column, *(show(result[column]) for result in results)] for column in COLUMNS]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def predicted(dense: dict, sparse: dict, ranks: int) -> list[dict]:
    """Return the seconds that both runs would take on networks, by `hvd_sparse.performance_model`.

    What was measured here, where bytes cost next to nothing, plus the exchange; none of it overlaps. With DGC, that is
    the time of the bytes that a rank receives, as if all came by all-gathers: a step that is small enough for an
    all-reduce takes up to twice as long.
    """
    rows = []
    for name, bandwidth in NETWORKS.items():
        network = Network(bandwidth)
        reduced = network.all_reduce(dense["payload_bytes"] / dense["steps"], ranks)
        gathered = network.all_gather(sparse["received_bytes"] / sparse["steps"] / (ranks - 1), ranks)
        seconds = [one["seconds"] + one["steps"] * exchange for one, exchange in ((dense, reduced), (sparse, gathered))]
        rows.append({"network": name, "none": seconds[0], "dgc": seconds[1]})
    return rows


def show(value) -> str:
    """Format one cell."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Train both, print the table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--framework", choices=EXAMPLES, default="pytorch")
    arguments, options = parser.parse_known_args()
    example, ranks, epochs = EXAMPLES[arguments.framework], arguments.ranks, arguments.epochs
    if ranks < 2:
        parser.error(f"--ranks must be at least 2, as one process exchanges nothing; got {ranks}")
    dense = train(example, "none", ranks, epochs, without_compression(options))
    sparse = train(example, "dgc", ranks, epochs, ["--density", str(arguments.density), *options])
    print(f"\n{table([dense, sparse])}")
    gained = sparse["accuracy"] - dense["accuracy"]
    settled, overall = sparse["last_step"]["ratio"], dense["payload_bytes"] / sparse["payload_bytes"]
    print(f"\nDGC moves {settled:.0f} times fewer bytes once warmed up, {overall:.0f} times fewer over the whole run;")
    print(f"accuracy {gained:+.2f} points against dense.")
    forecast = predicted(dense, sparse, ranks)
    print("\nThe same run on a network, predicted from the bytes and the seconds above:")
    for row in forecast:
        times = f"dense {row['none']:,.0f} s, DGC {row['dgc']:,.0f} s"
        print(f"    {row['network']:>10}: {times}, {row['none'] / row['dgc']:.1f} times as fast")
    print(json.dumps({"results": [dense, sparse], "predicted": forecast}))


if __name__ == "__main__":
    main()
