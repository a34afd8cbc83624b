"""Every example refuses a switch that has no effect with the chosen method, and names the methods that have it."""

import argparse
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hvd_sparse.algorithms import Settings
from hvd_sparse.parameter_server import METHODS as ASYNCHRONOUS

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TRAIN = EXAMPLES.parent / "scripts" / "train.py"
DENSE = {"none", "fp16"}
GIVEN = {  # {switch: a value, and the compressor's argument}
    "--density": ("0.02", "density"),
    "--threshold": ("0.5", "value"),
    "--lifespan": ("7", "lifespan"),
    "--scope": ("model", "scope"),
    "--values": ("float16", "values"),
    "--exchange": ("hierarchical", "exchange"),
    "--ranks-per-host": ("2", "ranks_per_host"),
    "--between-hosts": ("gather", "between_hosts"),
    "--dense-fallback": ("measured", "dense_fallback"),
}
LOW_BIT = ["--values", "int2"]
HIERARCHICAL = ["--exchange", "hierarchical"]
REFUSED = [
    ("dct", ["--scope", "model"], "--scope is for --method dgc, samomentum, gradient_dropping, topk"),
    ("micro", ["--between-hosts", "gather"], "--between-hosts is for --method dgc,"),
    ("sidco", ["--ranks-per-host", "2"], "--ranks-per-host is for --method dgc,"),
    ("dgc", ["--lifespan", "3"], "--lifespan is for --method dct: leave it out with --method dgc"),
    ("dgc", ["--threshold", "0.1"], "--threshold is for --method hard_threshold: leave"),
    ("samomentum", ["--no-factor-masking"], "--factor-masking is for --method dgc: leave it out with"),
    ("none", LOW_BIT, "--values is for --method dgc,"),
    ("fp16", [*LOW_BIT, "--level", "min"], "--values is for --method dgc,"),
    ("none", ["--granularity", "channel"], "--granularity is for --method dgc,"),
    ("fp16", ["--dense-fallback", "measured"], "--dense-fallback is for --method dgc,"),
    ("hard_threshold", ["--density", "0.1"], "--density is for --method dgc,"),
    ("none", ["--tensorboard", "events"], "--tensorboard is for --method dgc,"),
    ("dgc", ["--level", "min"], "--level is for --values int2, int1: leave it out with --values float32"),
    ("dgc", ["--values", "float16", "--granularity", "channel"], "--granularity is for --values int2, int1"),
    (
        "dgc",
        ["--between-hosts", "gather"],
        "--between-hosts is for --exchange hierarchical: leave it out with --exchange gather",
    ),
    ("micro", ["--ranks-per-host", "2"], "--ranks-per-host is for --exchange hierarchical"),
    ("dgc", ["--exchange", "auto", "--between-hosts", "gather"], "leave it out with --exchange auto"),
    ("micro", ["--exchange", "reduce_scatter"], "--method micro: exchange must be one of 'gather', 'hierarchical'"),
]
EXAMPLES_OF_METHODS = [
    "pytorch_digits",
    "pytorch_char_lstm",
    "pytorch_transformer",
    "pytorch_synthetic_benchmark",
    "tensorflow2_digits",
    "tensorflow2_keras_digits",
    "tensorflow2_synthetic_benchmark",
]


def parse(load, options, size=2):
    """Return the arguments that the training examples have, on `size` ranks; nothing is started."""
    parser, reporting = argparse.ArgumentParser(), load("reporting")
    reporting.add_arguments(parser, batch_size=4, lr=0.1)
    parser.parse_args = functools.partial(parser.parse_args, options)
    host = SimpleNamespace(init=lambda **options: None, rank=lambda: 0, size=lambda: size)
    return reporting.parse_arguments(parser, host)


def settings_of(load, options):
    return load("reporting").compression_settings(parse(load, options), warmup_steps=0)


@pytest.mark.parametrize(("method", "options", "told"), REFUSED)
@pytest.mark.parametrize("example", EXAMPLES_OF_METHODS)
def test_an_example_refuses_a_switch_of_other_methods(example, method, options, told, load, capsys, monkeypatch):
    module = load(example)
    monkeypatch.setattr(sys, "argv", [example, "--method", method, *options])
    with pytest.raises(SystemExit) as refused:  # before Horovod starts
        getattr(module, "parse_arguments", module.main)()
    assert refused.value.code == 2 and told in capsys.readouterr().err


def parameters_of(method):
    """Return the arguments of a method of the plugin; Horovod's own methods have none."""
    return set() if method in DENSE else set(inspect.signature(getattr(Settings, method)).parameters)


@pytest.mark.parametrize("switch", GIVEN)
def test_a_switch_is_for_the_methods_with_its_argument(switch, load, capsys):
    value, name = GIVEN[switch]
    for method in load("reporting").METHODS:
        options = ["--method", method, switch, value]
        if name in parameters_of(method):
            options += HIERARCHICAL if switch in ("--ranks-per-host", "--between-hosts") else []
            assert str(settings_of(load, options)[name]) == value, method
        else:
            with pytest.raises(SystemExit):
                parse(load, options)
            assert f"{switch} is for --method" in capsys.readouterr().err, method


def test_switches_of_low_bit_values_are_passed_on(load):
    for method in set(load("reporting").METHODS) - DENSE:
        found = settings_of(load, ["--method", method, *LOW_BIT, "--level", "min", "--granularity", "channel"])
        assert (found["values"], found["level"], found["granularity"]) == ("int2", "min", "channel")


def test_factor_masking_is_of_dgc(load):
    for given, expected in (("--no-factor-masking", False), ("--factor-masking", True)):
        assert settings_of(load, ["--method", "dgc", given])["factor_masking"] is expected


def test_what_is_not_given_has_the_default_of_the_plugin(load):
    """The examples set what belongs to an optimizer or a run, and hard_threshold's value, which has no default."""
    own = {"seed", "warmup", "momentum", "weight_decay", "clip_norm", "nesterov", "clip_scope", "value"}
    for method in set(load("reporting").METHODS) - DENSE:
        settings = settings_of(load, ["--method", method])
        assert set(settings) <= own, method
        getattr(Settings, method)(None, **settings)  # they are all that the method needs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], 6000),
        (["--epochs", "5"], 500),
        (["--epochs", "1"], 100),
        (["--epochs", "5", "--warmup-epochs", "1.5"], 1500),
        (["--epochs", "5", "--warmup-epochs", "9"], 5000),
        (["--epochs", "5", "--warmup-epochs", "0"], 0),
    ],
)
def test_a_tenth_of_the_run_is_its_warm_up(options, expected, load):
    """60 epochs are the default; 1,000 steps each here."""
    digits, parser = load("digits_data"), argparse.ArgumentParser()
    digits.add_arguments(parser, lambda parser, **defaults: None)
    args = parser.parse_args(options)
    args.batch_size, args.size = 4, 2
    digits.count_steps(8000, args)
    assert args.warmup_steps == expected


@pytest.mark.parametrize(("given", "expected"), [(None, 40), (7, 7), (0, 0), (500, 400)])
def test_a_tenth_of_the_steps_is_their_warm_up(given, expected, load):
    assert load("reporting").warmup_steps(given, 400) == expected


def test_the_report_has_the_density_of_the_compressor(load, capsys):
    reporting = load("reporting")
    args = SimpleNamespace(method="dgc", size=2, rank=0, seed=0, batch_size=1, lr=1.0)
    found = []
    for method, settings in [("dgc", {}), ("dgc", {"density": 0.5}), ("hard_threshold", {"value": 1.0}), (None, {})]:
        traffic = reporting.Traffic(10, None, args)
        if method:
            traffic.compression = SimpleNamespace(algorithm=getattr(Settings, method)(None, **settings))
        reporting.print_json("x", args, traffic)
        found.append(json.loads(capsys.readouterr().out)["target_density"])
    assert found == [inspect.signature(Settings.dgc).parameters["density"].default, 0.5, None, 1.0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--method", "asgd", "--density", "0.1"], "--density is for --method dgs, dgc_async, gd_async, dct_async"),
        (["--method", "gd_async", "--momentum", "0.5"], "--momentum is for --method dgs, dgc_async, msgd"),
        (
            ["--method", "dgs", "--lifespan", "5"],
            "--lifespan is for --method dct_async: leave it out with --method dgs",
        ),
        (["--task", "digits", "--hidden", "8"], "--hidden is for --task char_lstm: leave it out with --task digits"),
        (["--task", "digits", "--sequence-length", "8"], "--sequence-length is for --task char_lstm"),
        (["--task", "char_lstm", "--epochs", "8"], "--epochs is for --task digits"),
        (["--steps", "4", "--epochs", "3"], "--epochs is for runs without --steps"),
    ],
)
def test_the_asynchronous_examples_refuse_what_has_no_effect(options, told, load, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytorch_dgs.py", *options])
    with pytest.raises(SystemExit) as refused:  # the TensorFlow example calls the same function
        load("asynchronous_run").parse_arguments("")
    assert refused.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("method", ASYNCHRONOUS)
def test_asynchronous_methods_have_their_own_defaults(method, load, monkeypatch):
    run = load("asynchronous_run")
    monkeypatch.setattr(sys, "argv", ["pytorch_dgs.py", "--method", method])
    args = run.parse_arguments("")
    args.warmup_steps = 0
    made, plain = run.make_method(args), ASYNCHRONOUS[method]()
    assert made.describe() == plain.describe()
    assert (args.density, args.momentum) == (plain.density, plain.momentum)
    assert args.lifespan == (plain.lifespan if method == "dct_async" else None)


def test_every_asynchronous_setting_is_passed_on(load, monkeypatch):
    run, values = load("asynchronous_run"), {"--density": "0.2", "--momentum": "0.5", "--lifespan": "7"}
    for switch, methods in run.SWITCHES.items():
        for method in methods:
            monkeypatch.setattr(sys, "argv", ["pytorch_dgs.py", "--method", method, switch, values[switch]])
            args = run.parse_arguments("")
            args.warmup_steps = 0
            assert getattr(run.make_method(args), switch.strip("-")) == float(values[switch]), (method, switch)


def test_the_comparison_refuses_a_density_of_dense_methods_alone(load, capsys, monkeypatch):
    compare = load("compare_methods")
    monkeypatch.setitem(compare.FRAMEWORKS, "pytorch", "no_such_module")
    for methods, error in ((["none", "fp16"], SystemExit), (["none", "dgc"], ModuleNotFoundError)):
        monkeypatch.setattr(sys, "argv", ["compare_methods.py", "--density", "0.1", "--methods", *methods])
        with pytest.raises(error):
            compare.parse_arguments()
    assert "--density is for --methods dgc," in capsys.readouterr().err


def test_the_comparison_refuses_settings_of_dense_methods(load, capsys, monkeypatch):
    compare = load("compare_methods")
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", "--methods", "none:density=0.5", "dgc"])
    with pytest.raises(SystemExit) as refused:
        compare.parse_arguments()
    assert refused.value.code == 2 and "none has no settings, got 'density=0.5'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("dgc:foo=1", "dgc:foo=1: "),
        ("dgc:values=int3", "dgc:values=int3: values must be one of 'float32',"),
        ("hard_threshold:value=-1", "hard_threshold:value=-1: value must be"),
    ],
)
def test_the_comparison_refuses_settings_before_it_starts(method, told, load, capsys, monkeypatch):
    compare = load("compare_methods")
    monkeypatch.setitem(compare.FRAMEWORKS, "pytorch", "no_such_module")
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", "--methods", "none", "hard_threshold", method])
    with pytest.raises(SystemExit) as refused:
        compare.parse_arguments()
    assert refused.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "density", "process_sets"),
    [("dct:sparsity=0.9", None, None), ("dct", 0.01, None), ("dgc:exchange=hierarchical", 0.01, "dynamic")],
)
def test_the_comparison_takes_what_a_method_takes(method, density, process_sets, load, monkeypatch):
    compare, started = load("compare_methods"), []
    trainer = SimpleNamespace(start=lambda process_sets: (started.append(process_sets), 2))
    monkeypatch.setitem(sys.modules, "a_framework", SimpleNamespace(Trainer=trainer))
    monkeypatch.setitem(compare.FRAMEWORKS, "pytorch", "a_framework")
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", "--methods", "none", method])
    args = compare.parse_arguments()
    _, name, own = args.methods[1]
    settings = compare.settings_of(name, own, args)
    assert started == [process_sets] and settings.get("density") == density and own.items() <= settings.items()


@pytest.mark.parametrize(("size", "method", "is_told"), [(1, "dgc", True), (1, "none", False), (2, "dgc", False)])
def test_one_process_is_told_that_it_trains_dense(size, method, is_told, load, capsys):
    parse(load, ["--method", method, "--quiet"], size)
    output, errors = capsys.readouterr()
    assert not output and errors.splitlines() == ["one process exchanges nothing: it trains dense"] * is_told


@pytest.mark.parametrize(("options", "is_refused"), [([], False), (["--powersgd", "2"], True)])
def test_powersgd_has_no_checkpoint(options, is_refused, load, capsys, monkeypatch):
    """Its error feedback is in PyTorch's hook, which saves none."""
    training, digits = load("pytorch_training"), load("pytorch_digits")
    host = SimpleNamespace(init=lambda **options: None, rank=lambda: 0, size=lambda: 2, has_cuda=lambda: False)
    monkeypatch.setattr(training, "host_of", lambda args: host)
    monkeypatch.setattr(sys, "argv", ["pytorch_digits.py", "--host", "ddp", "--checkpoint", "file", *options])
    monkeypatch.setattr(torch, "set_flush_denormal", lambda is_set: None)
    if is_refused:
        with pytest.raises(SystemExit) as refused:
            digits.parse_arguments()
        assert refused.value.code == 2 and "--checkpoint is not for --powersgd" in capsys.readouterr().err
    else:
        assert digits.parse_arguments().checkpoint == "file"


@pytest.mark.parametrize(("rank", "name"), [(4, "powersgd_of_rank_4"), (None, "none")])
def test_powersgd_has_plots_of_its_own(rank, name, load, monkeypatch):
    """The plot of dense training is not overwritten."""
    reporting, paths = load("reporting"), []
    monkeypatch.setattr(load("plots"), "plot_curves", lambda rows, x, panels, title, path: paths.append(path))
    monkeypatch.setattr(reporting, "print_json", lambda *arguments, **results: None)
    args = SimpleNamespace(method="none", powersgd=rank, plot=None, rank=0, size=2, epochs=1)
    load("digits_data").report("x", [{"accuracy": 1.0, "test_loss": 1.0}], None, 1.0, args)
    row = {"step": 1, "perplexity": 1.0, "held_out_loss": 1.0}
    load("pytorch_training").report_steps("pytorch_transformer", "x", [row], None, 1.0, args)
    assert paths == [f"digits-{name}.png", f"transformer-{name}.png"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--dp-density", "1", "--lifespan", "5"], "--lifespan is for --dp-density below 1"),
        (["--stages", "1", "--threshold", "laplace"], "--threshold is for --stages 2, 3: leave it out with --stages 1"),
        (["--stages", "1", "--density", "0.1"], "--density is for --stages 2, 3"),
        (["--batch-size", "4", "--micro-batches", "5"], "--batch-size 4 is less than --micro-batches 5"),
    ],
)
def test_the_hybrid_example_refuses_what_has_no_effect(options, told, load, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytorch_dct_hybrid.py", *options])
    with pytest.raises(SystemExit) as refused:
        load("pytorch_dct_hybrid").parse_arguments()
    assert refused.value.code == 2 and told in capsys.readouterr().err


def test_the_model_parallel_examples_refuse_empty_micro_batches(load, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytorch_dct_mp.py", "--batch-size", "4", "--micro-batches", "9"])
    with pytest.raises(SystemExit) as refused:  # the TensorFlow example calls the same function
        load("model_parallel_run").parse_arguments("")
    assert refused.value.code == 2 and "--batch-size 4 is less than --micro-batches 9" in capsys.readouterr().err


def test_wrong_numbers_of_ranks_are_told_in_one_line(load, monkeypatch):
    """The plugin raises ValueError; the examples end with its message."""

    def refuse(*arguments, **options):
        raise ValueError("got 3 ranks")

    run, example = load("asynchronous_run"), load("pytorch_dct_hybrid")
    monkeypatch.setattr(example, "hybrid", refuse)
    task = type("Task", (run.Digits,), {"make_model": lambda self: None})
    for name, options, start in (
        ("pytorch_dct_hybrid.py", [], example.parse_arguments),
        ("pytorch_dgs.py", ["--servers", "colocated"], lambda: run.run("", "", {"digits": task}, id, refuse, None)),
    ):
        monkeypatch.setattr(sys, "argv", [name, *options])
        with pytest.raises(SystemExit) as refused:
            start()
        assert refused.value.code == "got 3 ranks"


def test_training_both_ways_gives_a_compressor_its_switches(monkeypatch, tmp_path):
    """`scripts/train.py` passes options on; those of a compressor only to the run that has one."""
    started = tmp_path / "started"
    stub = tmp_path / "horovodrun"
    stub.write_text(f'#!/bin/sh\necho "$*" >> {started}\nexit 1\n')
    stub.chmod(0o755)
    specification = importlib.util.spec_from_file_location("train", TRAIN)
    train = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(train)
    options = ["--values", "int2", "--lr", "0.1", "--level", "min", "--seed", "3", "--batch-size", "8"]
    assert train.without_compression(options) == ["--lr", "0.1", "--seed", "3", "--batch-size", "8"]
    command = [sys.executable, str(TRAIN), *options]
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode == 1
    (dense,) = started.read_text().splitlines()
    assert "--method none" in dense and "--values" not in dense and "--batch-size 8" in dense
