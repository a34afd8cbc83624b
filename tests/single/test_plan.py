"""`hvd_sparse plan`: its arguments, its table equals the model's, and the recommended call works."""

import itertools
import json
import re
import sys
from types import SimpleNamespace

import launching
import pytest
import torch
from launching import launch, mpirun

from hvd_sparse import __main__, job_network, plan
from hvd_sparse.dense_fallback import DenseFallback, TensorSize
from hvd_sparse.performance_model import Network, Profile, scattered
from hvd_sparse.torch import Compression
from hvd_sparse.torch.ddp import Compression as DDPCompression

HINT = "    warmup_steps: a tenth of the run's steps; momentum of the optimizer: 0"
SHORT_HINT = "    With SGD and fewer than 1,000 steps try factor_masking=False, and gradient_dropping."
FLAGS = ["--parameters", "1e6", "--compute-ms", "10", "--bandwidth", "1gbit", "--ranks", "4"]
METHODS = [("DGC ", ""), ("DGC ", ", reduce-scatter"), ("MiCRO ", "")]
JOB = ["-m", "hvd_sparse.plan", "--measure", "--parameters", "1e5", "--compute-ms", "5"]


def job(test):
    for mark in launching.MARKS:
        test = mark(test)
    return test


@pytest.fixture
def own_work(monkeypatch):
    """2 ms to compress, 0.5 ms to decode one rank's payload: no measurement."""
    monkeypatch.setattr(plan, "own_work", lambda n, density: (0.002, 0.0005))


def recommended(output):
    """Return the recommended call."""
    return next(line.strip() for line in output.splitlines() if line.startswith("    compression="))


def rows(output):
    """{method: [step in ms, gain over dense, speed-up over one rank]} of a table."""
    found = re.findall(r"^(\S+(?: 0\.\d+)?(?:, reduce-scatter)?) +([\d.]+) +([\d.]+)x +([\d.]+)x", output, re.MULTILINE)
    return {name: [float(number) for number in numbers] for name, *numbers in found}


def test_the_table_is_what_the_model_says(own_work, capsys):
    """4 MB on 4 ranks at 1 Gbit/s: 48 ms and 6 latencies of 50 us for dense, 5 of 10 ms of compute hide as much.

    Each step waits for a cycle of Horovod, 1 ms.
    """
    plan.main(FLAGS)
    output = capsys.readouterr().out
    table = rows(output)
    ours = [f"{name}{density}{more}" for density in (0.001, 0.01) for name, more in METHODS]
    ours.remove("MiCRO 0.001")  # no run shows that it trains well
    assert list(table) == ["dense", "fp16", *ours]
    dense = 10 + 48 + 0.3 - 5 + 1
    assert table["dense"] == [pytest.approx(dense, abs=0.05), 1.0, pytest.approx(40 / dense, abs=0.05)]
    assert table["fp16"][0] == pytest.approx(10 + 24 + 0.3 - 5 + 1, abs=0.05)
    assert table["DGC 0.001"][0] == pytest.approx(10 + 2 + 4 * 0.5 + 1, abs=0.05), "6 kB from each rank are hidden"
    assert table["DGC 0.001"][1] == pytest.approx(dense / 15, abs=0.01)


def test_the_command_is_the_module(own_work, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hvd_sparse", "plan", *FLAGS])
    __main__.main()
    printed = capsys.readouterr().out
    plan.main(FLAGS)
    assert printed == capsys.readouterr().out


def test_a_wrong_command_is_told_of_both_forms(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hvd_sparse", "foo"])
    with pytest.raises(SystemExit):
        __main__.main()
    told = capsys.readouterr().err
    assert "hvd_sparse [-h] [--version] [--check-build]" in told and "hvd_sparse plan [-h] ..." in told


def test_the_recommended_call_can_be_pasted(own_work, capsys):
    plan.main(FLAGS)
    call = recommended(capsys.readouterr().out)
    name, _, value = call.partition("=")
    assert name == "compression" and "density=0.01," in value
    eval(value, {"Compression": Compression, "model": torch.nn.Linear(3, 2), "warmup_steps": 100})


def test_a_reduce_scatter_is_recommended_to_many_ranks(own_work, capsys):
    plan.main([*FLAGS[:-1], "16"])
    output = capsys.readouterr().out
    table = rows(output)
    assert min(table, key=lambda name: table[name][0]) == "DGC 0.001, reduce-scatter"
    value = recommended(output).partition("=")[2]
    model = torch.nn.Linear(3, 2)
    names = {"Compression": Compression, "model": model, "warmup_steps": 100}
    made = eval(value, names).algorithm
    assert (made.exchange, made.complete) == ("reduce_scatter", True)
    assert "it may cost accuracy: compare" in output  # it changes fewer elements in a step


def test_what_may_cost_accuracy_must_be_clearly_faster(own_work, capsys):
    """Of eight ranks' payloads, a gather decodes eight in 4 ms, MiCRO none: 17 ms a step, and 14 and its exchange."""
    plan.main([*FLAGS[:-1], "8"])
    output = capsys.readouterr().out
    table = rows(output)
    gain = table["DGC 0.01"][0] / table["MiCRO 0.01"][0]
    assert min(table, key=lambda name: table[name][0]) == "MiCRO 0.01" and 1.05 < gain < 1.2
    assert f"{HINT}\n{SHORT_HINT}\nMiCRO 0.01 is {gain:.2f} times as fast, but may cost more accuracy" in output
    assert "Recommended: DGC 0.01\n" in output
    assert "it may cost accuracy: compare" not in output and "10,000 steps" not in output
    plan.main([*FLAGS[:4], "--bandwidth", "150mbit", "--ranks", "4"])
    output = capsys.readouterr().out
    table = rows(output)
    assert table["DGC 0.01"][0] > 1.2 * table["DGC 0.001"][0]
    calls = re.findall(
        r"(\S+ steps|Recommended): (.*)\n    compression=Compression.dgc\(.*density=([0-9.]+),.*\n(.*)", output
    )
    assert output.count(SHORT_HINT) == 1 and output.index(SHORT_HINT) > output.index("10,000 steps")
    assert calls == [("Recommended", "DGC 0.001", "0.001", HINT), ("10,000 steps", "DGC 0.01", "0.01", HINT)]


def at_many_ranks(monkeypatch, capsys, ranks):
    """The output for ResNet-50 and 1 s of compute; to compress and decode 25,600 elements take 16 and 0.9 ms."""
    monkeypatch.setattr(plan, "own_work", lambda n, density: (0.016, 0.0009) if density < 0.01 else (0.034, 0.008))
    plan.main(["--parameters", "25.6M", "--compute-ms", "1000", "--bandwidth", "1gbit", "--ranks", str(ranks)])
    return capsys.readouterr().out


def test_of_methods_about_as_fast_the_one_that_costs_least_accuracy_is_recommended(monkeypatch, capsys):
    """The gather is 1.19 times as fast as fp16, the reduce-scatter 1.3 times: 1.09 times as fast as the gather."""
    output = at_many_ranks(monkeypatch, capsys, 104)
    steps = {name: step for name, (step, *_) in rows(output).items()}
    assert min(steps, key=steps.get) == "DGC 0.001, reduce-scatter"
    fp16, gather = (steps[name] / steps["DGC 0.001, reduce-scatter"] for name in ("fp16", "DGC 0.001"))
    assert fp16 > 1.2 > fp16 / gather and gather < 1.1
    assert "Recommended: DGC 0.001\n" in output and f"{HINT}\nDGC 0.001, reduce-scatter is 1.09 times as" in output


def test_short_runs_have_a_recommendation_of_their_own(monkeypatch, capsys):
    output = at_many_ranks(monkeypatch, capsys, 108)
    assert rows(output)["DGC 0.01"][1] < 1.0, "the gather is slower than dense"
    assert "With fewer than 10,000 steps: DGC 0.01, reduce-scatter\n" in output


def test_the_hint_of_a_call_stands_below_it(own_work, capsys):
    """MiCRO's momentum is the optimizer's, DGC's is not."""
    found = set()
    for ranks, bandwidth in itertools.product(("8", "64", "1000"), ("10mbit", "1gbit", "10gbit")):
        plan.main([*FLAGS[:4], "--bandwidth", bandwidth, "--ranks", ranks])
        output = capsys.readouterr().out
        found |= set(re.findall(r": .*\n    compression=Compression\.(\w+)\(.*(?:\n    (warmup_steps))?", output))
    assert found == {("dgc", "warmup_steps"), ("micro", "")}


def test_short_latencies_are_not_rounded_away(own_work, capsys):
    for given, said in (("0.2", "0.2"), ("1.5", "1.5"), ("50", "50"), ("123456", "123,456")):
        plan.main([*FLAGS, "--latency-us", given])
        assert f" {said} us\n" in capsys.readouterr().out, given


def test_a_reduce_scatter_is_that_of_the_call(own_work, capsys):
    """With complete=True all ranks also reduce the 10,000 kept elements: 60 kB a rank, and 6 latencies."""
    plan.main([*FLAGS[:4], "--bandwidth", "10mbit", "--ranks", "4", "--latency-us", "1000"])
    step = rows(capsys.readouterr().out)["DGC 0.01, reduce-scatter"][0]
    network, profile = Network(1e7, 1e-3), Profile([1_000_000], 0.0)
    plain, more = scattered(0.01)(network, profile, 4), 8 * 60_000 / 1e7 + 6e-3
    cycles = 3  # one collective after the other
    assert step == pytest.approx(10 + 2 + 2 * 0.5 + 1e3 * (plain + more) - 2.5 + cycles, abs=0.05)


def test_where_the_network_is_fast_dense_is_recommended(own_work, capsys):
    plan.main([*FLAGS[:4], "--bandwidth", "100gbit", "--ranks", "64", "--latency-us", "1"])
    output = capsys.readouterr().out
    assert recommended(output) in ("compression=hvd.Compression.none", "compression=hvd.Compression.fp16")
    slower = [line for line in output.splitlines() if line.startswith("DGC")]
    assert slower and all(float(line.split("Gbit/s")[0].split()[-1]) < 100 for line in slower)


HIGH_LATENCY = ["--parameters", "1e6", "--compute-ms", "10", "--ranks", "256", "--latency-us", "500"]


def test_many_bytes_in_few_rounds_pay_above_a_bandwidth():
    """15 MB and 0.2 s of latencies, against 8 MB and 0.3 s: 56 Mbit in 0.1 s."""

    def method(megabytes, seconds):
        step = lambda network, ranks: seconds + 8e6 * megabytes / network.bandwidth  # noqa: E731
        return SimpleNamespace(name="one", step=step, speedup=lambda network, ranks: 1.0)

    for bandwidth in (1e7, 1e10):
        network, fewer, more = Network(bandwidth, 0.0), method(8, 0.3), method(15, 0.2)
        assert "> 0.56 Gbit/s" in plan.row(plan.Candidate(more, ""), fewer, network, 256)
        assert "< 0.56 Gbit/s" in plan.row(plan.Candidate(fewer, ""), more, network, 256)


@pytest.mark.parametrize(("density", "at_most"), [(0.001, 1400), (0.01, 140)])
def test_a_gather_pays_up_to_where_it_is_sent_dense(own_work, density, at_most, capsys):
    """An entry has about six bytes: the payloads of N ranks, 6 density n N, have fewer than 8 n in an all-reduce."""
    plan.main([*FLAGS[:4], "--bandwidth", "1gbit", "--latency-us", "500", "--ranks", "4"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"DGC {density:g} "))
    ranks = int(line.split()[-1])
    assert 0.9 * at_most < ranks < at_most
    settings = Compression.dgc(torch.nn.Linear(1000, 999).named_parameters(), density=density).algorithm
    model = {"model": TensorSize((1_000_000,), 4)}
    assert [DenseFallback(settings, model, ranks + more).sends_dense(density) for more in (0, 1)] == [False, True]


def test_what_the_compressor_would_send_dense_is_not_recommended(own_work, capsys):
    plan.main([*HIGH_LATENCY, "--bandwidth", "100mbit"])
    lines = capsys.readouterr().out.splitlines()
    dense = [line.split("  ")[0] for line in lines if "sent dense" in line]
    assert dense == ["DGC 0.01"]
    plan.main([*FLAGS[:4], "--bandwidth", "100mbit", "--ranks", "60000", "--latency-us", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("DGC 0.001 ")).endswith("payloads have more bytes")


def test_own_work_is_measured():
    compress, decode = plan.own_work(200_000, 0.01)
    assert 0.0 < compress < 1.0 and 0.0 < decode < 1.0


def test_own_work_of_a_large_model_is_that_of_a_part_times_its_size(monkeypatch):
    """The clock advances by a second each time it is read, so that a round of compressing or decoding takes one."""
    monkeypatch.setattr(plan, "time", SimpleNamespace(thread_time=itertools.count(0.0, 1.0).__next__))
    monkeypatch.setattr(plan, "MOST_MEASURED", 50_000)
    assert plan.own_work(50_000, 0.01) == (1.0, 1.0)
    assert plan.own_work(5_000_000, 0.01) == (100.0, 100.0)


@pytest.mark.parametrize("cycle", [1e-3, 0.0])
def test_bandwidth_comes_from_two_sizes(cycle):
    """Collectives of 4 ranks, played on a network, each after a cycle of Horovod: what comes out is that network."""
    network = Network(2e9, 1e-4, gather_cost=1.7)
    sizes = (job_network.SMALL, job_network.LARGE)
    reduced = [cycle + network.all_reduce(4 * elements, 4) for elements in sizes]
    gathered = [cycle + network.all_gather(4 * elements / 4, 4) for elements in sizes]
    found = job_network.network_from(reduced, gathered, world_size=4, cycle=cycle)
    assert [found.bandwidth, found.latency, found.gather_cost] == pytest.approx([2e9, 1e-4, 1.7], rel=0.01)


def test_gathers_can_cost_more_than_all_reduces(own_work, capsys, monkeypatch):
    """As where the ranks of a host share its link. 10 Mbit/s: 60 kB from each of three ranks take 144 ms, or 288."""
    steps = []
    for cost, told in ((1.0, "0 us\n"), (2.0, "0 us, a byte of a gather takes 2 times one of an all-reduce\n")):
        network = Network(1e7, 0.0, cost)
        monkeypatch.setattr(plan, "measure_job", lambda framework, host, network=network: (network, 4, 0, "torch"))
        plan.main([*FLAGS[:4], "--measure"])
        output = capsys.readouterr().out
        assert told in output
        steps.append(rows(output))
    for name, more in (("dense", 0.0), ("DGC 0.01", 144.0)):
        assert steps[1][name][0] - steps[0][name][0] == pytest.approx(more, rel=0.01), name


@pytest.mark.parametrize(
    ("framework", "parameters"), [("torch", "named_parameters()"), ("tensorflow", "trainable_var")]
)
def test_the_call_is_that_of_the_framework(own_work, framework, parameters, capsys, monkeypatch):
    plan.main([*FLAGS, "--framework", framework])
    assert parameters in recommended(capsys.readouterr().out)
    monkeypatch.setattr(plan, "measure_job", lambda asked, host: (Network(1e9), 4, 0, framework))
    plan.main([*FLAGS[:4], "--measure"])
    assert parameters in recommended(capsys.readouterr().out)


def test_without_a_job_the_call_is_that_of_an_installed_framework(own_work, capsys, monkeypatch):
    for found, parameters in (
        (("torch", "tensorflow"), "model.named_parameters()"),
        (("tensorflow",), "model.trainable_variables"),
        ((), "model.named_parameters()"),
    ):
        find_spec = lambda name, found=found: name if name in found else None  # noqa: E731
        monkeypatch.setattr(plan, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=find_spec)))
        plan.main(FLAGS)
        assert parameters in recommended(capsys.readouterr().out)


def test_what_is_given_is_not_taken_from_the_job(own_work, capsys, monkeypatch):
    monkeypatch.setattr(plan, "measure_job", lambda framework, host: (Network(2e9, 1e-4), 2, 0, "torch"))
    for given, told in (
        ([], "2 ranks, 2 Gbit/s, 100 us"),
        (["--ranks", "64"], "64 ranks, 2 Gbit/s, 100 us"),
        (["--bandwidth", "1gbit", "--latency-us", "7"], "2 ranks, 1 Gbit/s, 7 us"),
        (["--latency-us", "0"], "2 ranks, 2 Gbit/s, 0 us"),
        (["--latency-us", "1580.4"], "2 ranks, 2 Gbit/s, 1,580 us"),
    ):
        plan.main([*FLAGS[:4], "--measure", *given])
        assert told in capsys.readouterr().out


def test_the_framework_is_one_that_horovod_was_built_for(monkeypatch):
    def load(name):
        if name == "horovod.torch":
            raise ImportError("Extension horovod.torch has not been built")
        return SimpleNamespace(__name__=name)

    monkeypatch.setattr(job_network.importlib, "import_module", load)
    assert job_network.horovod_of(("torch", "tensorflow")).__name__ == "horovod.tensorflow"
    with pytest.raises(SystemExit, match=r"torch: Extension horovod\.torch has not been built"):
        job_network.horovod_of(("torch",))


@job
@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.exhaustive)])
def test_a_job_measures_its_network_and_one_rank_prints(framework):
    code, output = launch([*mpirun(2), sys.executable, *JOB, "--framework", framework])
    assert code == 0, output
    assert output.count("100,000 parameters, 5 ms of compute, 2 ranks") == 1, output
    assert output.count("Recommended: ") == 1 and len(rows(output)) == 7


@job
def test_a_lone_rank_has_no_network_to_measure():
    code, output = launch([sys.executable, *JOB])
    assert code == 1 and "--measure needs a job of several ranks: horovodrun -np 2" in output


def test_under_torchrun_the_calls_are_those_of_ddp_and_no_collective_waits_for_a_cycle(own_work, capsys, monkeypatch):
    """The steps of `test_the_table_is_what_the_model_says` without 1 ms, in a reduce-scatter without 3 ms."""
    plan.main([*FLAGS, "--host", "ddp"])
    output = capsys.readouterr().out
    table, lines = rows(output), output.splitlines()
    assert table["dense"][0] == pytest.approx(10 + 48 + 0.3 - 5, abs=0.05)
    assert table["DGC 0.001"][0] == pytest.approx(10 + 2 + 4 * 0.5, abs=0.05)
    at = lines.index("    from hvd_sparse.torch.ddp import Compression")
    name, _, call = lines[at + 1].strip().partition(" = ")
    assert (name, lines[at + 2]) == ("compression", "    compression.register(model)") and "density=0.01," in call
    made = eval(call, {"Compression": DDPCompression, "model": torch.nn.Linear(3, 2), "warmup_steps": 100})
    assert made.algorithm.name == "dgc"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    plan.main(FLAGS)
    assert capsys.readouterr().out == output
    plan.main([*FLAGS, "--host", "horovod"])
    assert "hvd_sparse.torch.ddp" not in (told := capsys.readouterr().out) and "compression=Compression.dgc" in told
    plan.main([*FLAGS[:4], "--bandwidth", "100gbit", "--ranks", "64", "--latency-us", "1"])
    assert re.search(r"    compression = Compression\.(none|fp16)\n    comp", capsys.readouterr().out)


def test_json_has_what_the_table_has(own_work, capsys):
    plan.main(flags := [*FLAGS[:4], "--bandwidth", "150mbit", "--ranks", "4"])
    output = capsys.readouterr().out
    plan.main([*flags, "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["network"] == {"bandwidth": 150e6, "latency": pytest.approx(5e-5), "gather_cost": 1.0}
    assert [found[name] for name in ("parameters", "compute_ms", "ranks", "host")] == [1_000_000, 10.0, 4, "horovod"]
    assert (found["recommended"], found["recommended_below_10000_steps"]) == ("DGC 0.001", "DGC 0.01")
    methods, table = {one["name"]: one for one in found["methods"]}, rows(output)
    assert list(methods) == list(table) and methods["dense"]["call"] == "hvd.Compression.none"
    for name, one in methods.items():
        shown = [one["step_ms"], one["speedup"]]
        assert shown == [pytest.approx(table[name][0], abs=0.051), pytest.approx(table[name][1], abs=0.0051)]
        assert not one["is_sent_dense"]
    assert methods["dense"]["step_ms"] == pytest.approx(10 + 320 + 0.3 - 5 + 1)
    assert f"    compression={methods['DGC 0.001']['call']}\n" in output


def test_json_of_what_is_sent_dense(own_work, capsys):
    plan.main([*HIGH_LATENCY, "--bandwidth", "100mbit", "--json"])
    methods = json.loads(capsys.readouterr().out)["methods"]
    (dense,) = [one for one in methods if one["is_sent_dense"]]
    assert dense["name"] == "DGC 0.01" and dense["step_ms"] is None and dense["speedup"] is None


def test_without_torchrun_there_is_no_job_of_ddp_to_measure(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match=r"--host ddp --measure needs a job of torchrun: .*environment variable RANK"):
        plan.main([*FLAGS[:4], "--measure", "--host", "ddp"])
