"""What the examples report: JSON whatever happened, bytes of resumed runs and of PowerSGD; what they refuse."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from hvd_sparse.algorithms import Settings

COMMON = {"rank": 0, "size": 1, "method": "none", "plot": "", "seed": 0, "batch_size": 1, "lr": 1.0, "density": 1.0}
COMMON |= {"verbose": False, "checkpoint": None, "epochs": 1}
BYTES = {"bytes_per_step": 0, "density": 1.0}
STEPS = [{"step": 1, "train_loss": 2.0, "held_out_loss": 3.0, "perplexity": 20.0, **BYTES}]
EPOCHS = [{"epoch": 1, "train_loss": 2.0, "test_loss": 3.0, "accuracy": 50.0, **BYTES}]


def arguments(**others):
    return SimpleNamespace(**{**COMMON, **others})


def strict(text):
    """Read JSON as the standard has it, without NaN and Infinity."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def end_steps(load, args, rows=STEPS):
    load("pytorch_training").report_steps("pytorch_x", "x", rows, load("reporting").Traffic(10, None, args), 1.0, args)


def end_epochs(load, args):
    load("digits_data").report("pytorch_x", EPOCHS, load("reporting").Traffic(10, None, args), 1.0, args)


def end_stages(load, args):
    run = load("model_parallel_run")
    args.grid = SimpleNamespace(stages=1, replicas=1)
    link = {"dense_bytes": 0, "sent_bytes": 0}
    one = {"stage": 0, "stages": 1, "inside": [], "dp_ratio": 1.0, "forward": link, "backward": link}
    vars(args).update({name: 1 for name in run.SETTINGS if not hasattr(args, name)})
    run.report("pytorch_x", [{"step": 1, "train_loss": 2.0, "loss": 3.0, "perplexity": 20.0}], [one], 1.0, args)


def end_asynchronous(load, args, loss=3.0):
    run = load("asynchronous_run")
    vars(args).update({name: 1 for name in run.SETTINGS.split() if not hasattr(args, name)})
    run.report("pytorch_x", [{"loss": loss, "perplexity": 20.0}], {"all": {"staleness": {}}}, 1.0, run.CharLSTM, args)


def test_a_run_that_diverged_ends_with_json(load, capsys):
    diverged = [{**STEPS[0], "train_loss": math.nan, "held_out_loss": math.nan, "perplexity": math.inf}]
    end_steps(load, arguments(), diverged)
    result = strict(capsys.readouterr().out)
    assert (result["loss"], result["perplexity"], result["curve"]) == (None, None, [[1, None]])
    end_asynchronous(load, arguments(), -math.inf)
    assert strict(capsys.readouterr().out)["loss"] is None


def test_numbers_that_are_not_finite_become_null_at_any_depth(load, capsys):
    load("reporting").print_record({"a": (1.0, [math.nan, {"b": -math.inf}]), "c": "nan", "d": {3: math.inf}})
    assert strict(capsys.readouterr().out) == {"a": [1.0, [None, {"b": None}]], "c": "nan", "d": {"3": None}}


@pytest.mark.parametrize("end", [end_steps, end_epochs, end_stages, end_asynchronous])
def test_a_plot_that_cannot_be_written_costs_no_results(end, load, capsys, tmp_path):
    end(load, arguments(plot=str(tmp_path / "curve.bmp")))
    output, errors = capsys.readouterr()
    assert strict(output.splitlines()[-1])["loss"] == 3.0
    assert "no plot in" in errors and "bmp" in errors


@pytest.mark.parametrize("end", [end_steps, end_epochs, end_stages, end_asynchronous])
def test_results_are_printed_before_the_plot_is_drawn(end, load, capsys, monkeypatch, tmp_path):
    def fail(*arguments):
        raise RuntimeError("no memory")

    monkeypatch.setattr(load("plots"), "save_plot", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        end(load, arguments(plot=str(tmp_path / "curve.png")))
    assert strict(capsys.readouterr().out.splitlines()[-1])["loss"] == 3.0


def test_only_settings_of_the_method_are_told(load, capsys):
    told = {"scope", "values", "exchange"}
    reporting = load("reporting")
    for method, expected in [
        ("none", set()),
        ("dgc", told),
        ("dct", {"values"}),
        ("micro", {"values", "exchange"}),
    ]:
        settings = {"exchange": "hierarchical"} if "exchange" in expected else {}
        compression = SimpleNamespace(algorithm=getattr(Settings, method)(None, **settings)) if expected else None
        args = arguments(method=method, size=2)
        traffic = reporting.Traffic(10, None, args)
        traffic.compression = compression
        reporting.print_json("x", args, traffic)
        result = strict(capsys.readouterr().out)
        assert told & set(result) == expected, method
        assert result.get("exchange", "hierarchical") == "hierarchical"


def test_a_resumed_run_counts_bytes_and_steps_from_there(load):
    reporting = load("reporting")
    dense = reporting.Traffic(10, None, arguments(size=2))
    dense.resume(7)
    dense.steps += 3
    result = dense.summary()
    assert (result["steps"], result["counted_steps"]) == (10, 3)
    assert result["dense_bytes"] == result["payload_bytes"] == result["received_bytes"] == 3 * 4 * 10
    assert dense.since_last()["bytes_per_step"] == 4 * 10


def test_a_checkpoint_that_some_ranks_cannot_read_is_refused(load, tmp_path):
    """Only rank 0 finds the file, on its own disk: every rank ends with the error, rank 0 included."""
    has_checkpoint, path = load("reporting").has_checkpoint, tmp_path / "checkpoint"

    def ask(*everyone):
        def sum_over_ranks(values, name):
            return [values[0] + sum(everyone)]

        return has_checkpoint(arguments(checkpoint=str(path), size=1 + len(everyone)), sum_over_ranks)

    assert ask(0.0) is False
    with pytest.raises(SystemExit, match="1 of 2 ranks find this file"):
        ask(1.0)
    path.touch()
    assert ask(1.0, 1.0) is True
    with pytest.raises(SystemExit, match="2 of 3 ranks find this file"):
        ask(0.0, 1.0)
    assert has_checkpoint(arguments(), None) is False


def test_one_process_says_that_it_drops_residuals(load, capsys, monkeypatch, tmp_path):
    training, model = load("pytorch_training"), torch.nn.Linear(2, 2)
    monkeypatch.setattr(training, "host_of", lambda args: SimpleNamespace(sum_over_ranks=lambda values, name: values))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = arguments(method="dgc", device="cpu", checkpoint=str(tmp_path / "checkpoint"))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rows": [], "steps": 4, "method": "dgc"}
    for more in ({}, {"compression": {"memory": {}}}):
        torch.save({**state, **more}, args.checkpoint)
        assert training.load(model, optimizer, None, args) == ([], 4)
        assert ("residuals in this file are dropped" in capsys.readouterr().err) == bool(more)


@pytest.mark.parametrize(("steps", "dense", "sent"), [(2, 8000, 8000), (3, 12000, 12000), (10, 40000, 14800)])
def test_the_bytes_of_powersgd_include_its_dense_steps(steps, dense, sent, load):
    """1000 elements. The first three steps are dense, those after send 100 elements."""
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    state.iter = steps
    state.total_numel_before_compression = max(0, steps - 3) * 1000
    state.total_numel_after_compression = max(0, steps - 3) * 100
    stats = load("pytorch_ddp").PowerSGDStats(state, 1000).stats()
    assert (stats["total"]["dense_bytes"], stats["total"]["payload_bytes"]) == (dense, sent)
    assert stats["total"]["ratio"] == pytest.approx(dense / sent)
    assert stats["step"]["payload_bytes"] == (400 if steps > 3 else 4000)


def test_a_text_that_is_too_short_for_a_window_is_refused(load):
    windows = load("pytorch_char_lstm").training_windows
    args = SimpleNamespace(batch_size=2, size=2, rank=1, sequence_length=47, device="cpu")
    assert next(windows(torch.arange(4 * 48), args))[0].shape == (2, 47)
    with pytest.raises(SystemExit, match="188 characters are too few for 2 ranks with --batch-size 2"):
        next(windows(torch.arange(4 * 47), args))


def test_a_batch_that_is_larger_than_the_data_is_refused(load):
    """By an error that a pool's process can hand back: SystemExit would end it, and its pool wait for ever."""
    click_data = load("click_data")
    assert len(next(click_data.batches(range(512), 256, 0, 1, 2))) == 256
    with pytest.raises(ValueError, match="--batch-size 256 is more than the 255 rows of a replica"):
        next(click_data.batches(range(511), 256, 0, 1, 2))


def test_the_synthetic_benchmarks_report_the_spread_of_measurements(load, capsys):
    synthetic, args = load("synthetic"), arguments(num_warmup_batches=0, num_iters=2, num_batches_per_iter=1, width=8)
    args.batch_size, args.model, times = 6, "mlp", iter([9.0, 2.0, 1.0])
    traffic = load("reporting").Traffic(10, None, args)
    synthetic.report("x", lambda count: next(times), traffic, lambda values, name: values, args)
    result = strict(capsys.readouterr().out)
    assert result["samples_per_second_per_rank"] == 4.5
    assert result["samples_per_second_spread"] == pytest.approx(1.96 * 1.5)


@pytest.mark.parametrize("ending", [{"pushes": 12}, {"departures": {1: "ValueError: x", 3: ""}}])
def test_the_first_worker_waits_for_the_others_unless_they_have_left(load, ending):
    pytest.importorskip("mpi4py")
    asked = {"pushes": 9, "departures": {}}, {"pushes": 9, "departures": {1: "ValueError: x"}}
    answers = iter([{"all": answer} for answer in (*asked, {**asked[1], **ending})])
    load("asynchronous_run").wait_for_others(SimpleNamespace(stats=lambda: next(answers)), 12, 3)
    assert next(answers, None) is None
