"""The main job: train a digits example under horovodrun, dense and with DGC, and put both side by side."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANK_TAG = re.compile(r"\[[\d,]+\]<stdout>:")  # what horovodrun puts before lines, and at times behind them
EXAMPLES = {
    "pytorch": "pytorch_digits.py",
    "tensorflow": "tensorflow2_digits.py",
    "keras": "tensorflow2_keras_digits.py",
}
COLUMNS = ("method", "accuracy", "loss", "density", "dense_bytes", "payload_bytes", "ratio", "seconds")


def train(example: str, method: str, ranks: int, options: list[str]) -> dict:
    """Run an example on `ranks` processes; show what it prints, and return its last line, a JSON object."""
    command = ["horovodrun", "-np", str(ranks), sys.executable, str(ROOT / "examples" / example)]
    command += ["--method", method, *options]
    print("\n$ " + " ".join(command).replace(f"{ROOT}/", ""), flush=True)
    result = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            text = RANK_TAG.sub("", line).strip()
            if text.startswith("{") and text.endswith("}"):
                result = json.loads(text)
    if process.returncode != 0 or result is None:
        sys.exit(f"the example failed with exit code {process.returncode}; its output is above")
    return result


def table(results: list[dict]) -> str:
    """Return the results side by side, a column a run."""
    rows = [[column, *(show(result[column]) for result in results)] for column in COLUMNS]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def show(value) -> str:
    """Format one cell."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Train both, print the table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--framework", choices=EXAMPLES, default="pytorch")
    arguments, options = parser.parse_known_args()
    example = EXAMPLES[arguments.framework]
    dense = train(example, "none", arguments.ranks, options)
    sparse = train(example, "dgc", arguments.ranks, ["--density", str(arguments.density), *options])
    print(f"\n{table([dense, sparse])}")
    gained = sparse["accuracy"] - dense["accuracy"]
    settled, overall = sparse["last_step"]["ratio"], dense["payload_bytes"] / sparse["payload_bytes"]
    print(f"\nDGC moves {settled:.0f} times fewer bytes once warmed up, {overall:.0f} times fewer over the whole run;")
    print(f"accuracy {gained:+.2f} points against dense.")
    print(json.dumps({"results": [dense, sparse]}))


if __name__ == "__main__":
    main()
