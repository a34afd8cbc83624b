"""`make train` prints whole lines without tags, one for each epoch, and a progress bar only on a terminal."""

import fcntl
import importlib.util
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest

ROOT = Path(__file__).parent.parent.parent
TRAIN = ROOT / "scripts" / "train.py"
RESULT = dict.fromkeys(("accuracy", "loss", "density", "dense_bytes", "payload_bytes", "ratio", "seconds", "steps"), 1)
RESULT |= {"received_bytes": 1, "method": "stub", "last_step": {"ratio": 1}}
# What Open MPI makes of two ranks' unbuffered output: tags in the middle of lines, pieces of several ranks in turn.
TAGGED = f"""#!/bin/sh
test "$TF_CPP_MIN_LOG_LEVEL" = 3 || echo "log level: $TF_CPP_MIN_LOG_LEVEL"
echo 'WARNING: All log messages before absl::InitializeLog() is called are written to STDERR' >&2
echo 'I0000 00:00:1795393979.150353   27635 port.cc:153] oneDNN custom operations are on.' >&2
echo 'To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the flags.' >&2
printf '[1,0]<stdout>: epoch  loss[1,0]<stdout>:\\n'
printf '[1,0]<stdout>:     1  [1,1]<stderr>:careful\\n[1,0]<stdout>:0.25\\n'
printf '[1,0]<stdout>:     2  0.12\\n[1,0]<stdout>:{json.dumps(RESULT)}\\n'
"""
SHOWN = [" epoch  loss", "     1  0.25", "     2  0.12"]


def load(path):
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tags", [("[1,0]<stdout>:", "[1,12]<stderr>:"), ("[0]<stdout>:", "[12]<stderr>:")])
def test_pieces_of_several_ranks_become_whole_lines(tags):
    one, other = tags
    output = [f"{one}ab{other}xy\n", "horovodrun's own\n", f"{one}\n", f"{one}[1] of 2\n", f"{other}end"]
    assert list(load(TRAIN).untagged(output)) == [
        ("12", "stderr", "xy"),
        ("", "", "horovodrun's own"),
        ("0", "stdout", "ab"),
        ("0", "stdout", "[1] of 2"),
        ("12", "stderr", "end"),
    ]


def start_with_stub(tmp_path, stderr):
    stub = tmp_path / "horovodrun"
    stub.write_text(TAGGED)
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    command = [sys.executable, str(TRAIN), "--epochs", "2"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)


def assert_clean(stdout):
    lines = stdout.splitlines()
    assert [line for line in lines if line in SHOWN] == SHOWN * 2  # dense, then DGC
    # Each with its command; the table; two sentences; a prediction for two networks; JSON.
    assert len(lines) == 2 * (2 + len(SHOWN)) + 1 + 8 + 3 + 4 + 1
    last = json.loads(lines[-1])
    assert last["results"] == [RESULT, RESULT]
    assert [row["network"] for row in last["predicted"]] == ["100 Mbit/s", "1 Gbit/s"]


def test_a_prediction_adds_what_the_network_takes():
    """4 ranks, 10 steps of 12.5 MB dense: 18.75 MB in 6 messages each. 3.75 MB received of payloads, in 2 messages.

    What a rank sends is more than a third of that: rows of an all-reduce are sent once, and received once.
    """
    dense = {"seconds": 7.0, "steps": 10, "payload_bytes": 125_000_000}
    sparse = {"seconds": 9.0, "steps": 10, "payload_bytes": 20_000_000, "received_bytes": 37_500_000}
    slow, fast = load(TRAIN).predicted(dense, sparse, ranks=4)
    assert slow["none"] == pytest.approx(7 + 10 * (1.5 + 6 * 5e-5))
    assert slow["dgc"] == pytest.approx(9 + 10 * (0.3 + 2 * 5e-5))
    assert fast["none"] == pytest.approx(7 + 10 * (0.15 + 6 * 5e-5))
    assert fast["dgc"] == pytest.approx(9 + 10 * (0.03 + 2 * 5e-5))


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("first", "second"), [("torch", "tensorflow"), ("tensorflow", "pytorch"), ("torch", "keras")])
def test_the_second_framework_builds_both(first, second, tmp_path):
    """Horovod for one framework replaces Horovod for the other, whose mark that it is there would stay."""
    for name in (".environment", f".horovod-{first}", f".extension-{first}"):
        (tmp_path / name).touch()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}

    def planned(framework):
        command = ["make", "-n", "train", f"FRAMEWORK={framework}", f"VENV={tmp_path}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return [line.split(" && ")[0] for line in done.stdout.splitlines()]

    assert planned(second)[:2] == ["scripts/horovod.sh all", "scripts/extension.sh all"]
    again = planned({"torch": "pytorch"}.get(first, first))
    assert len(again) == 1 and again[0].startswith("scripts/run.sh python scripts/train.py")


def test_without_a_terminal_there_is_no_bar(tmp_path):
    process = start_with_stub(tmp_path, subprocess.PIPE)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert_clean(stdout)
    assert stderr.splitlines() == ["[rank 1] careful"] * 2


def test_on_a_terminal_there_is_one_bar(tmp_path):
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process = start_with_stub(tmp_path, end)
    os.close(end)
    stdout, _ = process.communicate(timeout=60)
    stderr = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert process.returncode == 0, stderr
    assert_clean(stdout)
    assert all(f"\r{method}:   0%|" in stderr for method in ("none", "dgc")) and "| 0/2 [" in stderr


def test_an_example_prints_a_line_an_epoch_and_no_bar_through_a_pipe(capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    reporting = load(ROOT / "examples" / "reporting.py")
    with reporting.Progress(4, SimpleNamespace(verbose=True)) as bar:
        for epoch in (1, 2):
            bar.update(2)
            bar.set_postfix(loss=0.5)
            bar.report({"epoch": epoch, "loss": 0.5 / epoch})
            lines, bars = capsys.readouterr()
            header = " epoch        loss\n" if epoch == 1 else ""
            assert lines == f"{header}     {epoch}  {0.5 / epoch:10.4g}\n" and bars == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow", "keras"])
@pytest.mark.skipif("OMPI_COMM_WORLD_SIZE" in os.environ, reason="starts jobs of its own, not inside another job")
@pytest.mark.skipif(launching.MPIRUN is None, reason="needs mpirun")
def test_training_prints_nothing_else(framework, tmp_path):
    options = ["--epochs", "2", "--warmup-epochs", "0", "--batch-size", "32", "--plot", ""]
    environment = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    code, output = launching.launch([sys.executable, str(TRAIN), "--framework", framework, *options], environment)
    assert code == 0, output
    lines = output.splitlines()
    found = [line.split() for line in lines if line.split()[:1] in (["epoch"], ["1"], ["2"])]
    rows = [row for row in found if row[1:2] != ["Gbit/s:"]]  # of the prediction
    assert [row[0] for row in rows] == ["epoch", "1", "2"] * 2 and {len(row) for row in rows} == {6}
    assert len(lines) == 2 * 5 + 1 + 8 + 3 + 4 + 1, output
    assert [run["method"] for run in json.loads(lines[-1])["results"]] == ["none", "dgc"]
