"""The examples run with few steps on two ranks; their last line is a JSON object."""

import argparse
import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import launching
import pytest
import torch
from launching import launch, mpirun

from hvd_sparse.checkpoint import load_state

pytestmark = launching.MARKS
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
LOW_BIT = ["--method", "gradient_dropping", "--values", "int2", "--granularity", "channel"]
FEW_EPOCHS = ["--epochs", "1", "--warmup-epochs", "0", "--batch-size", "32"]
FEW_STEPS = ["--steps", "4", "--warmup-steps", "1"]
TRANSFORMER = [*FEW_STEPS, "--width", "64", "--layers", "2", "--heads", "2", "--sequence-length", "16"]
METHODS = ["--methods", "none", "dgc:values=int1", "dct:lifespan=2", "hard_threshold", "micro"]


def run(example, options, ranks=2):
    code, output = launch([*mpirun(ranks), sys.executable, str(EXAMPLES / example), *options, "--quiet"])
    assert code == 0, output
    assert "Warning: hvd_sparse" not in output
    return json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))


@pytest.mark.parametrize(
    ("example", "options"),
    [
        pytest.param("pytorch_digits.py", FEW_EPOCHS, marks=pytest.mark.exhaustive),  # as in the next test
        ("tensorflow2_digits.py", FEW_EPOCHS),
        pytest.param("pytorch_char_lstm.py", FEW_STEPS, marks=pytest.mark.exhaustive),
        pytest.param("pytorch_transformer.py", TRANSFORMER, marks=pytest.mark.exhaustive),
    ],
)
def test_training_tells_what_was_sent(example, options, tmp_path):
    result = run(example, [*options, *LOW_BIT, "--plot", "", "--tensorboard", str(tmp_path)])
    check_what_was_sent(result, tmp_path)


def check_what_was_sent(result, tmp_path):
    """Check a run with LOW_BIT, whose events are in a folder."""
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert (result["method"], result["values"], result["world_size"]) == ("gradient_dropping", "int2", 2)
    assert result["steps"] >= 4 and result["loss"] > 0.0
    assert result["target_density"] == 0.01
    # payloads of a small step are rows of an all-reduce: those of both ranks count
    assert result["last_step"]["payload_bytes"] < result["last_step"]["dense_bytes"] / 20


@pytest.mark.parametrize(
    ("framework", "example"),
    [
        ("torch", "pytorch_digits.py"),
        pytest.param("tensorflow", "tensorflow2_digits.py", marks=pytest.mark.exhaustive),
    ],
)
def test_a_checkpoint_is_gone_on_from(framework, example, tmp_path):
    """A second epoch alone, of a job that begins with the first one's model and residuals."""
    (tmp_path / "events").mkdir()
    options = ["--warmup-epochs", "0", "--batch-size", "32", *LOW_BIT, "--plot", "", "--checkpoint"]
    options.append(str(tmp_path / "checkpoint"))
    first = run(example, ["--epochs", "1", *options, "--tensorboard", str(tmp_path / "events")])
    check_what_was_sent(first, tmp_path / "events")
    waiting = waiting_in(framework, tmp_path / "checkpoint")
    assert waiting and max(waiting) > 0.0
    second = run(example, ["--epochs", "2", *options])
    assert second["steps"] == 2 * first["steps"] and second["loss"] < first["loss"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "events"]


@pytest.mark.exhaustive
def test_a_checkpoint_is_gone_on_from_with_another_number_of_ranks_but_not_with_another_method(tmp_path):
    path, copy = tmp_path / "checkpoint", tmp_path / "copy"
    options = ["--warmup-epochs", "0", "--batch-size", "32", "--plot", "", "--checkpoint"]
    same = ["--epochs", "1", *options, str(path), "--method", "dgc"]
    first = run("pytorch_digits.py", same)
    assert run("pytorch_digits.py", same)["loss"] == first["loss"]  # there is nothing left to do
    for ranks in (1, 3):
        shutil.copy(path, copy)
        second = run("pytorch_digits.py", ["--epochs", "2", *options, str(copy), "--method", "dgc"], ranks)
        assert second["loss"] < first["loss"]
        group = torch.load(copy, weights_only=True)["optimizer"]["param_groups"][0]
        steps = 2 * (second["steps"] - first["steps"])
        assert group["lr"] == pytest.approx(0.01 * (1 + math.cos(math.pi * (steps - 1) / steps)))  # of the last step
        assert group["momentum"] == (0.9 if ranks == 1 else 0.0)
    command = [*mpirun(2), sys.executable, str(EXAMPLES / "pytorch_digits.py"), *options, str(path), "--method", "none"]
    code, output = launch([*command, "--quiet"])
    assert code != 0 and "--method none cannot continue" in output and "which is of --method dgc" in output


@pytest.mark.exhaustive
def test_a_checkpoint_is_gone_on_from_with_another_number_of_ranks_in_tensorflow(tmp_path):
    path = tmp_path / "checkpoint"
    options = ["--warmup-epochs", "0", "--batch-size", "32", "--method", "dgc", "--plot", "", "--checkpoint", str(path)]
    first = run("tensorflow2_digits.py", ["--epochs", "1", *options])
    for ranks in (3, 1):
        epochs = 2 if ranks == 3 else 3
        last = run("tensorflow2_digits.py", ["--epochs", str(epochs), *options], ranks)
        iterations = [int(value) for value in load_state(path)["variables"] if not value.shape]
        assert epochs * (1437 // (32 * ranks)) in iterations
    assert last["loss"] < first["loss"]


def waiting_in(framework, path):
    """Return the largest magnitudes of the residuals in a checkpoint."""
    state = torch.load(path, weights_only=True) if framework == "torch" else load_state(path)
    return [float(abs(buffers["residual"]).max()) for buffers in state["compression"]["memory"].values() if buffers]


SYNTHETIC = ["--num-warmup-batches", "0", "--num-batches-per-iter", "2", "--num-iters", "2", "--width", "64"]


@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("pytorch_digits.py", [*FEW_EPOCHS, *LOW_BIT, "--plot", ""]),
        ("pytorch_char_lstm.py", [*FEW_STEPS, *LOW_BIT, "--plot", ""]),
        ("pytorch_transformer.py", [*TRANSFORMER, *LOW_BIT, "--plot", ""]),
        ("pytorch_synthetic_benchmark.py", [*SYNTHETIC, *LOW_BIT]),
        ("pytorch_digits.py", [*FEW_EPOCHS, "--powersgd", "1", "--plot", ""]),
    ],
)
@pytest.mark.exhaustive
def test_an_example_under_ddp(example, options):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, output = launch([*torchrun, str(EXAMPLES / example), "--host", "ddp", *options, "--quiet"])
    assert code == 0, output
    result = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    assert result["world_size"] == 2 and result["steps"] >= 4
    assert result["last_step"]["payload_bytes"] < result["last_step"]["dense_bytes"] / 10


@pytest.mark.parametrize(("method", "beta1"), [("none", 0.9), ("gradient_dropping", 0.9), ("dgc", 0.0)])
def test_the_transformer_has_one_momentum(method, beta1, monkeypatch):
    """AdamW's first moment, or that of a compressor that applies momentum on the ranks; matrices alone decay."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("pytorch_transformer")
    args = argparse.Namespace(method=method, size=2, momentum=0.9, lr=0.1, decay=0.5)
    groups = module.make_optimizer(module.Model(8, 1, 2, 4), args).param_groups
    assert [group["betas"] for group in groups] == [(beta1, 0.99)] * 2
    assert {(p.dim() > 1, group["weight_decay"]) for group in groups for p in group["params"]} == {
        (True, 0.5),
        (False, 0.0),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_the_comparison_writes_table_steps_and_plots(framework, tmp_path):
    result = run("compare_methods.py", [*FEW_EPOCHS, "--framework", framework, "--out", str(tmp_path), *METHODS])
    assert list(result["methods"]) == METHODS[1:]
    assert result["methods"]["micro"]["build_up"] == pytest.approx(1.0)
    assert 1.5 < result["methods"]["dgc:values=int1"]["build_up"] <= 2.0
    assert result["methods"]["hard_threshold"]["sent"] > 0.01
    table = (tmp_path / "comparison.md").read_text()
    assert all(f"| {method} |" in table for method in METHODS[1:])
    steps = (tmp_path / "steps.csv").read_text().splitlines()
    assert len(steps) == 1 + len(METHODS[1:]) * (1437 // 64)
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_the_layer_norm_experiment():
    result = run("pytorch_layer_norm.py", ["--steps", "5"])
    assert [(row["method"], row["layer_norm"]) for row in result["runs"]] == [
        (method, norm) for norm in (False, True) for method in ("dense", "local", "global")
    ]


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("digits", ["--method", "asgd", "--servers", "1"]),
        pytest.param(
            "char_lstm",
            ["--method", "dgs", "--servers", "colocated", "--overlap", "--pull-density", "0.02"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@pytest.mark.parametrize("framework", ["pytorch", pytest.param("tensorflow2", marks=pytest.mark.exhaustive)])
def test_the_asynchronous_example(framework, task, options, tmp_path):
    path = tmp_path / "staleness.png"
    steps = ["--steps", "4", "--evaluations", "2", "--plot", str(path)]
    result = run(f"{framework}_dgs.py", ["--task", task, *steps, *options])
    workers = 2 if task == "char_lstm" else 1
    assert (result["task"], result["workers"], result["steps"]) == (task, workers, 4)
    assert result["loss"] > 0.0
    assert path.read_bytes().startswith(b"\x89PNG")
    stats = result["stats"]
    assert stats["all"]["pushes"] == sum(stats["all"]["staleness"].values()) == 4 * workers
    assert (stats["ratio_up"] > 5) == (result["density"] < 1) == (result["method"] == "dgs")


@pytest.mark.parametrize(
    "example", ["pytorch_dct_mp.py", pytest.param("tensorflow2_dct_mp.py", marks=pytest.mark.exhaustive)]
)
def test_the_model_parallel_example(example, tmp_path):
    path = tmp_path / "losses.png"
    small = ["--batch-size", "4", "--sequence-length", "16", "--width", "40", "--blocks", "3", "--heads", "2"]
    options = ["--steps", "4", "--evaluations", "2", "--plot", str(path), "--density", "0.1", "--schedule", "1f1b"]
    result = run(example, [*small, *options])
    assert (result["boundaries"], result["stages"], result["steps"]) == (1, 2, 4)
    assert 0.0 < result["loss"] < 5.0 and result["perplexity"] > 1.0
    assert (result["occupancy"], result["dp_ratio"]) == (0.1, 1.0)
    assert 5.0 < result["forward_ratio"] < result["backward_ratio"] < 10.0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_stages_on_one_rank_are_those_on_several():
    small = ["--batch-size", "4", "--sequence-length", "16", "--width", "40", "--blocks", "3", "--heads", "2"]
    options = [*small, "--steps", "3", "--boundaries", "1", "--quiet"]
    code, output = launch([sys.executable, str(EXAMPLES / "pytorch_dct_mp.py"), *options])
    assert code == 0, output
    alone = json.loads(output.splitlines()[-1])
    together = run("pytorch_dct_mp.py", options[:-1])
    assert alone["loss"] == together["loss"] and alone["occupancy"] == together["occupancy"]
    assert (alone["world_size"], together["world_size"]) == (1, 2)


@pytest.mark.parametrize(
    "options",
    [
        ["--stages", "2"],
        pytest.param(["--stages", "1"], marks=pytest.mark.exhaustive),
        pytest.param(["--stages", "2", "--density", "1"], marks=pytest.mark.exhaustive),
    ],
)
def test_the_hybrid_example(options):
    steps = ["--steps", "4", "--rows", "600", "--batch-size", "32", "--micro-batches", "2", "--dp-density", "0.1"]
    result = run("pytorch_dct_hybrid.py", [*steps, *options])
    stages, replicas = int(options[1]), 2 // int(options[1])
    assert (result["stages"], result["replicas"], len(result["links"])) == (stages, replicas, 2)
    assert result["data"] == "generated" and 0.0 < result["loss"] < 1.0 and 0.0 < result["accuracy"] <= 100.0
    is_sparse = stages == 2 and result["density"] < 1.0
    assert (
        (result["occupancy"] < 0.06)
        == (result["forward_ratio"] > 5.0)
        == (result["backward_ratio"] > 12.0)
        == is_sparse
    )
    assert (result["dp_ratio"] > 3.0) == (replicas == 2)


def test_an_asynchronous_run_in_words():
    specification = importlib.util.spec_from_file_location("report", EXAMPLES / "asynchronous_report.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    everyone = {"pushes": 111, "updates_per_second": 3.0, "server_bytes": 3000, "bytes_in": 5, "bytes_out": 2**31}
    everyone |= {"staleness": {"2": 10, "0": 100, "70": 1}, "departures": {1: "", 3: "RuntimeError: no"}}
    worker = {"pushes": 50, "repeated": 0, "non_finite": 1, "seconds": 9.0, "seconds_waiting": 1.0}
    ways = {f"{what}_{way}": 10.0 for what in ("ratio", "density") for way in ("up", "down")}
    sizes = {"bytes_up": 1023, "bytes_down": 2**20 + 2048, "bytes_model": 2048}
    lines = module.report({**worker, **ways, **sizes, "all": everyone}).splitlines()
    assert any("1 gradients not finite" in line for line in lines)
    assert "left early   worker 3: RuntimeError: no" in lines
    assert any(line.split()[:3] == ["up", "1023", "B,"] for line in lines)
    assert any("1.0 MiB and the model, 2.0 KiB, ratio 10.0" in line for line in lines)
    assert [line.split()[:2] for line in lines if "#" in line] == [["0", "100"], ["2", "10"]]
    assert lines[-1].split() == ["11+", "1"] and "2.0 GiB" in "".join(lines)
