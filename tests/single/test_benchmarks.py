"""The benchmarks run at small sizes: their checks hold, and their last line has their figures."""

import argparse
import ast
import contextlib
import importlib
import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_sparse.algorithms import Settings

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name, monkeypatch):
    """Import a benchmark, such as network/run: both folders have a module `asynchronous`."""
    path = BENCHMARKS / f"{name}.py"
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(path.parent))
    specification = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def start(module, monkeypatch, *options):
    """Run a benchmark's main function with options."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, options)])
    module.main()


def figures_of(script, *options):
    """Run a benchmark as a process; return its last line."""
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("framework", ["pytorch", pytest.param("tensorflow", marks=pytest.mark.exhaustive)])
def test_kernels(framework):
    figures = figures_of("kernels.py", f"--framework={framework}", "--elements=70000", "--rounds=2", "--settle=2")
    assert figures["framework"] == framework and figures["elements"] == 70000
    assert {"topk_over_compress", "compress_over_memcpy", "reduce_over_memcpy", "elias_fano_bits"} <= set(figures)
    assert all(value > 0 for value in figures.values() if isinstance(value, float))


def test_rows():
    figures = figures_of("rows.py", "--rows", "9", "--columns", "300", "--rounds", "2")
    assert figures["k"] == 15 and figures["select_pack_over_topk"] > 0


@pytest.mark.exhaustive
def test_boundaries(tmp_path):
    names = ["dense", "laplace, 1 split, 0.05", "gradient alone with feedback, 0.05", "topk with feedback, 0.05"]
    options = ["--seeds", "0", "--steps", "3", "--rows", "600", "--processes", "1", "--out", str(tmp_path)]
    assert figures_of("boundaries.py", *options, "--runs", *names)["runs"] == 4
    table = (tmp_path / "boundaries.md").read_text()
    assert all(f"| {name} |" in table for name in names)
    assert (tmp_path / "boundaries.png").read_bytes().startswith(b"\x89PNG")
    runs = json.loads((tmp_path / "boundaries.json").read_text())["runs"]
    assert all(0.0 < run["loss"] < 2.0 for run in runs)


def made_up_run(name, seed, loss, sent):
    """What the hybrid example would say: its own test starts it."""
    link = {"dense_bytes": 100_000_000, "sent_bytes": sent}
    links = [
        {"stage": stage, "replica": 0, **dict.fromkeys(("forward", "backward", "replicas"), link)} for stage in (0, 1)
    ]
    ratios = dict.fromkeys(("forward_ratio", "backward_ratio", "dp_ratio"), 100_000_000 / sent)
    return {"name": name, "seed": seed, "loss": loss, "accuracy": 80.0, **ratios, "links": links}


def test_hybrid_tables(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    hybrid = importlib.import_module("hybrid")
    runs = [
        made_up_run("dense", 0, 0.5, 100_000_000),
        made_up_run("dense", 1, 0.4, 100_000_000),
        made_up_run("both 0.05", 0, 0.51, 5_000_000),
        made_up_run("both 0.05", 1, 0.39, 5_000_000),
        made_up_run("three stages, both 0.1", 0, 0.5, 5_000_000),  # whose dense run is missing
    ]
    text = hybrid.write(runs, 3, tmp_path)
    assert "| both 0.05 | 0.4500 | -0.25 | +2.00, -2.50 | 80.00 | 20.0 | 20.0 | 20.0 |" in text
    assert "| three stages, both 0.1 | 0.5000 |  |  | 80.00 |" in text
    assert "| both 0.05 | 1 | 0 | 5.00 | 5.00 | 5.00 |" in text
    assert json.loads((tmp_path / "hybrid.json").read_text())["runs"] == runs
    assert (tmp_path / "hybrid.md").read_text().strip() == text


def test_a_batch_that_is_larger_than_the_data_does_not_hang():
    command = [sys.executable, str(BENCHMARKS / "boundaries.py"), "--rows", "200", "--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--batch-size 256 is more than --rows 200" in done.stderr


@pytest.mark.parametrize(
    ("name", "file", "before", "options"),
    [
        ("boundaries", "boundaries.json", {"settings": {"steps": 2000}, "runs": []}, ["--steps", "3"]),
        ("hybrid", "hybrid.json", {"steps": 1000, "runs": []}, ["--steps", "3"]),
        ("asynchronous", "asynchronous_tuned.json", {"batch_size": 8, "runs": []}, ["--batch-size", "4"]),
        ("convergence", "convergence_digits.json", {"runs": [{"world_size": 4}]}, ["--ranks", "2"]),
        ("convergence", "convergence_digits.json", {"runs": [{"world_size": 4}]}, ["--epochs", "1"]),
    ],
)
def test_results_of_other_settings_are_not_overwritten(name, file, before, options, monkeypatch, tmp_path):
    module = load(name, monkeypatch)
    monkeypatch.setattr(subprocess, "run", None)  # no job is started
    monkeypatch.setattr("multiprocessing.get_context", None)
    (tmp_path / file).write_text(json.dumps(before))
    with pytest.raises(SystemExit, match=f"{file} has results of .* name another folder with --out"):
        start(module, monkeypatch, "--seeds", 0, "--out", tmp_path, *options)
    assert json.loads((tmp_path / file).read_text()) == before and len(list(tmp_path.iterdir())) == 1


def test_a_run_that_diverged_is_in_the_tables(monkeypatch, tmp_path):
    convergence = load("convergence", monkeypatch)
    answers = iter([2.0, None])
    row = {"world_size": 4, "ratio": 1.0, "density": 1.0}

    def train(script, options, ranks, seed, extra):
        loss = next(answers)
        return {**row, "seed": seed, "loss": loss, "curve": [[1, 2.0], [2, loss]]}

    monkeypatch.setattr(convergence, "train", train)
    monkeypatch.setitem(convergence.EXPERIMENTS, "transformer", ("", [], "loss", {"dense": []}))
    start(convergence, monkeypatch, "--experiments", "transformer", "--seeds", 0, 1, "--out", tmp_path)
    assert "| dense | nan | 2.000, nan |" in (tmp_path / "convergence_transformer.md").read_text()
    hybrid = load("hybrid", monkeypatch)
    runs = [made_up_run("dense", 0, 0.5, 10**8), made_up_run("both 0.05", 0, None, 10**6)]
    assert "| both 0.05 | nan | +nan | +nan |" in hybrid.write(runs, 3, tmp_path)


def test_the_description_of_a_machine_has_what_is_installed(monkeypatch):
    module = load("machine", monkeypatch)

    def version(package):
        if package == "tensorflow":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.2"

    monkeypatch.setattr(module, "version", version)
    assert "torch 1.2, horovod 1.2" in module.machine() and "tensorflow" not in module.machine()


def test_exchanges(monkeypatch, tmp_path):
    """A gather is decoded by one call of a job's operator, whose sum is checked. --out is needed with other sizes."""
    module = load("exchanges", monkeypatch)
    small = ["--parameters", 30_000, "--ranks", 2, 3, "--jobs"]
    with pytest.raises(SystemExit):
        start(module, monkeypatch, *small)
    start(module, monkeypatch, *small, "--out", tmp_path)
    assert [one["ranks"] for one in json.loads((tmp_path / "exchanges.json").read_text())["simulated"]] == [2, 3]
    shapes = []
    monkeypatch.setattr(module.ops, "reduce_payloads", lambda gathered, *others: shapes.append(len(gathered)))
    entries = module.SparseVector(np.arange(5), np.ones(5, np.float32))
    with pytest.raises(RuntimeError, match="not the sum of all ranks"):
        module.decode_all([entries] * 3, 100, 5)
    assert shapes == [3]


@pytest.mark.parametrize(("more", "jobs"), [(["--in-turns"], 1), ([], 9)])
def test_rounds_in_turns_have_one_job_in_tensorflow(more, jobs, monkeypatch):
    """`--in-turns` takes all rounds in one job; a job for each round would leave one of them."""
    run = load("network/run", monkeypatch)
    started = []

    class Lab:
        addresses = ("10.0.0.1",)

        def mpirun(self, command):
            started.append(command[command.index("--rounds") + 1])
            return [sys.executable, "-c", "print('{}')"]

        def stop(self):
            pass

    point = {"framework": "tensorflow", "model": "mlp10"}
    args = argparse.Namespace(seconds=1.0, batch_size=8, rounds=9)
    assert list(run.measure(Lab(), point, ["dense"], args, more)) == [{}] * jobs
    assert started == [str(9 // jobs)] * jobs


class Rates:
    """Hosts that keep the rates of their links."""

    def __init__(self):
        self.rates = []

    def shape(self, rate):
        self.rates.append(rate)


@pytest.fixture
def lab(monkeypatch):
    """Return a function that imports a module of network/ without hosts, and the rates that they would have."""
    rates = Rates()

    def load_without_hosts(name):
        module = load(f"network/{name}", monkeypatch)
        monkeypatch.setattr(module, "enter_switch", lambda: None)
        monkeypatch.setattr(module, "hosts", lambda count: contextlib.nullcontext(rates))
        return module, rates.rates

    return load_without_hosts


def test_the_time_to_accuracy_without_a_limit(lab, monkeypatch, tmp_path):
    module, rates = lab("accuracy")
    monkeypatch.setattr(module, "train", lambda hosts, run: [(1.0, 99.0)])
    options = ["--rates", "none", "1gbit", "--examples", "digits", "--methods", "dense", "--seeds", 0]
    start(module, monkeypatch, *options, "--out", tmp_path)
    assert rates == [None, "1gbit"]


def test_asynchronous_runs_of_other_lengths_are_other_runs(lab, monkeypatch, tmp_path):
    module, rates = lab("asynchronous")
    lengths = []

    def figure_5(hosts, method, steps):
        lengths.append(steps)
        return {"curve": [(0.0, 3.0), (float(steps), 2.0)]}

    def figure_6(hosts, run, seconds):
        lengths.append(seconds)
        return {"speedup": seconds}

    monkeypatch.setattr(module, "loss_against_time", figure_5)
    monkeypatch.setattr(module, "speed", figure_6)
    before = [{"figure": 5, "rate": "1gbit", "workers": 8, "servers": 1, "method": "asgd", "curve": [[9.0, 2.0]]}]
    before += [{"figure": 6, "rate": "none", "workers": 1, "servers": 1, "method": "asgd", "speedup": 0.5}]
    (tmp_path / "network_asynchronous.json").write_text(json.dumps(before))
    options = ["--figures", "5", "6", "--methods", "asgd", "--workers", 1, "--servers", 1, "--rates", "none"]
    for more in ([], ["--steps", 300, "--seconds", 2], ["--steps", 300, "--seconds", 2]):
        start(module, monkeypatch, *options, "--out", tmp_path, *more)
    assert sorted(lengths) == [2.0, 300]  # those of the file have the default lengths
    assert sorted(rates, key=str) == ["1gbit", None]
    page = (tmp_path / "network_asynchronous.md").read_text()
    assert "| asgd | 300 | 1.0 | 2.000 |" in page and "| none | 1 | asgd | 2.0 |" in page
    assert len(json.loads((tmp_path / "network_asynchronous.json").read_text())) == 4


def test_the_page_of_simulated_ranks_has_all_commands(monkeypatch, tmp_path):
    module = load("exchange_convergence", monkeypatch)
    figures = {"metric": 99.0, "residual_norm": 1.0, "received": 1000.0, "changed": 10.0}
    monkeypatch.setattr(module, "train", lambda run: {**run, **figures})
    options = ["--out", tmp_path, "--densities", 0.01, "--exchanges", "gather", "--ranks", 4, "--seeds", 0]
    with pytest.raises(SystemExit):  # the name of a run that is always there
        start(module, monkeypatch, *options, "--methods", "dense")
    for task in ("digits", "char_lstm"):
        start(module, monkeypatch, *options, "--methods", "dgc", "--tasks", task)
    heading = (tmp_path / "exchange_convergence.md").read_text().splitlines()[2]
    assert "--tasks digits`, `python benchmarks/exchange_convergence.py" in heading and "--tasks char_lstm`" in heading


def test_a_share_is_of_a_run_without_a_limit_of_the_same_session(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "network"))
    report = importlib.import_module("report")
    job = {"framework": "pytorch", "model": "mlp10", "hosts": 4, "batch_size": 8, "step_ms": 10.0}
    job |= {"compute_ms": 5.0, "compress_ms": 0.0, "decompress_ms": 0.0, "bytes_per_step": 10**6}
    job |= {"link": {"bandwidth": 1e9, "latency": 1e-4}}

    def run(method, rate, session, speed, batch=8):
        more = {"method": method, "rate": rate, "session": session, "batch_size": batch}
        return {**job, **more, "samples_per_second": speed}

    results = [
        run("dense", "none", "Monday", 40.0),
        run("dense", "1gbit", "Monday", 10.0),
        run("dense", "100mbit", "Tuesday", 1.0),
        run("fp16", "none", "Tuesday", 80.0, batch=16),
        run("fp16", "1gbit", "Tuesday", 20.0),
        run("dgc", "none", None, 60.0),
        run("dgc", "1gbit", None, 30.0),
    ]
    rows = report.write(results, results, tmp_path)
    assert [one["share"] for one in rows] == [1.0, 0.25, None, 1.0, None, None, None]
    text = (tmp_path / "network.md").read_text()
    assert "| Horovod | 1.0 | 10.0 (25 %) | 40.0 |" in text
    assert "| Horovod, fp16 |  | 20.0 |  |" in text and "| Horovod, fp16 | 80.0 |" in text
    assert "of 1 runs" in text  # what the performance model can be checked with


def test_runs_that_are_missing(monkeypatch):
    common = load("common", monkeypatch)
    runs = [{"name": "dense", "seed": 0, "loss": 0.5}, {"name": "dgc", "seed": 1, "loss": 0.5}]
    wanted = itertools.product(["dense", "dgc"], [1, 0, 1])
    assert common.missing(wanted, runs, ("name", "seed")) == [("dense", 1), ("dgc", 0)]


def test_the_last_line_of_a_job(monkeypatch):
    common, python = load("common", monkeypatch), [sys.executable, "-c"]
    assert common.last_json([*python, "print('3 ranks\\n{\"loss\": 0.5}')"], timeout=30) == {"loss": 0.5}
    with pytest.raises(subprocess.CalledProcessError):
        common.last_json([*python, "print('{}'); raise SystemExit(3)"])


def test_the_median_of_an_action(monkeypatch):
    common, calls = load("common", monkeypatch), []
    clock = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(common, "perf_counter", lambda: next(clock))
    assert common.median_seconds(3, calls.append, 7) == 2.0 and calls == [7, 7, 7]


def test_one_worker_of_msgd_alone(monkeypatch):
    """The methods after msgd have as many workers as those before."""
    module = load("asynchronous", monkeypatch)
    args = argparse.Namespace(tasks=["digits"], workers=[4, 8], methods=["dgs", "msgd", "asgd"], updates=10)
    rows = [(row["name"], row["workers"], row["momentum"]) for row in module.rows_of(args)]
    assert rows == [
        (name, count, momentum)
        for workers in (4, 8)
        for name, count, momentum in [("dgs", workers, 0.7), ("msgd", 1, 0.7), ("asgd", workers, 0.0)]
    ]


SCRIPTS = {str(path.relative_to(BENCHMARKS)): path.read_text() for path in sorted(BENCHMARKS.glob("**/*.py"))}
COMMANDS = [
    (script, command)
    for script, source in SCRIPTS.items()
    for text in [ast.get_docstring(ast.parse(source)).replace("\\\n", "")]
    for command in re.findall(rf"benchmarks/{script} (.*--.*)", text)
]


def test_docstrings_have_commands():
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize(("script", "command"), COMMANDS)
def test_the_commands_of_a_docstring_have_only_switches_that_exist(script, command):
    source = " ".join(SCRIPTS[script].split()).replace("( ", "(")
    for switch in re.findall(r"--[a-z-]+", command):
        assert f'add_argument("{switch}"' in source, switch


class Parsed(Exception):
    """The parser of a benchmark's command line."""


@pytest.mark.parametrize(
    "name", ["boundaries", *(f"network/{name}" for name in ("run", "accuracy", "asynchronous", "exchanges", "stages"))]
)
def test_a_default_that_is_called_all_is_all(name, monkeypatch):
    def stop(parser):
        raise Parsed(parser)

    module = load(name, monkeypatch)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed) as parsed:
        module.main()
    found = [action for action in parsed.value.args[0]._actions if "default: all" in (action.help or "")]
    assert all(list(action.default) == list(action.choices) for action in found)
    assert found or name == "network/run"  # whose default is a choice of methods


@pytest.mark.parametrize("framework", ["pytorch", pytest.param("tensorflow2", marks=pytest.mark.exhaustive)])
def test_a_gradient_that_is_not_finite_is_refused(framework, monkeypatch):
    worker = load(f"{framework}_worker", monkeypatch)
    gradient = worker.as_tensor(np.full(5000, np.nan, np.float32))
    for compress in ("compress", "compress_with_topk"):
        with pytest.raises(Exception, match="gradient must be finite"):
            getattr(worker.Worker(Settings.dgc(None), 5000), compress)(gradient)


TENSORFLOW_JOB = """
import sys
sys.path[:0] = {folders!r}
import methods, tensorflow_job
methods.MODELS["tiny"] = methods.Layers((16, 32, 10))
updated = []
job = tensorflow_job.Job("tiny", methods.METHODS["dense"], 4)
before = [variable.numpy() for variable in job.variables]
job.variables[0].assign_add(before[0])
update = job._update
job._update = lambda variables, *others: (updated.append(variables), update(variables, *others))
assert job.compute(3) > 0.0
assert (job.variables[0].numpy() == 2 * before[0]).all() and job.velocities[0].numpy().max() == 0.0
(twins,) = updated
assert (twins[0].numpy() != 2 * before[0]).any()
"""


@pytest.mark.exhaustive
def test_the_compute_time_in_tensorflow_is_of_a_training_step():
    """As in PyTorch: forward, backward and optimizer, of a copy of the model."""
    program = TENSORFLOW_JOB.format(folders=[str(BENCHMARKS), str(BENCHMARKS / "network")])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
