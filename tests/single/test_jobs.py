"""Small jobs of several processes that must end with the right error, which a test inside a job could not check."""

import os
import re
import shutil
import sys
import textwrap

import launching
import pytest
from launching import KERAS_2, launch, mpirun

pytestmark = launching.MARKS

PREAMBLE = """
import os, sys, time
import horovod.torch as hvd
import torch
hvd.init()
torch.set_num_threads(1)
console = os.open(f"{os.environ['JOB_OUTPUT']}/{hvd.rank()}", os.O_CREAT | os.O_WRONLY)
os.dup2(console, 1), os.dup2(console, 2)  # a file of each rank's own: lines of several ranks mix in a pipe
from hvd_sparse.torch import Compression

def make(names, n=2000, compression=Compression.gradient_dropping, optimizer_options=None, **settings):
    parameters = {name: torch.nn.Parameter(torch.zeros(n)) for name in names}
    compression = compression(parameters.items(), **settings)
    inner = torch.optim.SGD(list(parameters.values()), lr=0.1)
    return parameters, hvd.DistributedOptimizer(
        inner, list(parameters.items()), compression, **(optimizer_options or {}))

def backward(parameters, order=None):
    for name in order or parameters:
        (parameters[name] * torch.randn(parameters[name].shape)).sum().backward()

def step(parameters, optimizer):
    optimizer.zero_grad()
    backward(parameters)
    optimizer.step()
"""


@pytest.fixture
def run_job(tmp_path):
    """Return run(script, ranks, environment): (exit code, what ranks and mpirun wrote). A hang is a failure."""

    def run(script, ranks=2, environment=None, launcher=None):
        command = [*(launcher or mpirun(ranks)), sys.executable, "-c", PREAMBLE + textwrap.dedent(script)]
        code, output = launch(command, {"JOB_OUTPUT": str(tmp_path), **(environment or {})})
        return code, "".join(file.read_text() for file in sorted(tmp_path.iterdir())) + output

    return run


UNEVEN = """
parameters, optimizer = make(["a", "b"], {settings})
for _ in range(3 + (hvd.rank() != {first})):
    step(parameters, optimizer)
hvd.join()
"""
JOIN = {
    "tensor": 'scope="tensor", density=0.01',
    "model": 'scope="model", density=0.01',
    "dense": "density=1.0",
    "small": "min_numel=10**6",
}


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        pytest.param("tensor", 0, marks=pytest.mark.exhaustive),
        ("model", 1),
        pytest.param("dense", 0, marks=pytest.mark.exhaustive),
        pytest.param("small", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_join_with_uneven_steps_is_refused(run_job, settings, first):
    """Rank `first`, the coordinator or another, has joined; the other rank, which still trains, raises the error."""
    code, output = run_job(UNEVEN.format(settings=JOIN[settings], first=first))
    assert code != 0
    assert "RuntimeError: hvd_sparse does not work with hvd.join()" in output, output
    assert "Give every rank" in output


@pytest.mark.exhaustive
def test_join_after_equal_steps_works(run_job):
    """In a separate job, because unanswered collectives of earlier tests would meet the ranks that have joined."""
    script = """
        parameters, optimizer = make(["a", "b"], density=0.03)
        for _ in range(3):
            step(parameters, optimizer)
        hvd.join()
        step(parameters, optimizer)
        everyone = hvd.allgather(torch.cat(list(parameters.values())).detach()[None])
        assert everyone.count_nonzero() and (everyone == everyone[0]).all()
        print("together")
    """
    code, output = run_job(script)
    assert code == 0 and output.count("together") == 2, output


def test_compressions_built_in_another_order_are_refused(run_job):
    """The difference is not visible at once, but no rank waits forever."""
    code, output = run_job(
        """
        if hvd.rank() == 1:
            make(["stranger"])
        step(*make(["a", "b"]))
        """,
        environment={"HVD_SPARSE_TIMEOUT": "3"},
    )
    assert code != 0
    assert "RuntimeError: hvd_sparse: the other ranks did not take part" in output, output
    assert "within 3 s (set HVD_SPARSE_TIMEOUT if ranks may be later)" in output, output
    assert "in the same order" in output


def test_a_process_set_given_to_the_optimizer_alone_is_refused(run_job):
    code, output = run_job(
        """
        from hvd_sparse.torch import exchange
        exchange.TIMEOUT_SECONDS = 5
        part = hvd.add_process_set([0, 1])
        parameters, optimizer = make(["a"], optimizer_options={"process_set": part})
        step(parameters, optimizer)
        time.sleep(15 * (hvd.rank() == 2))
        """,
        ranks=3,
        environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
    )
    assert code != 0 and re.search("ValueError.*process_set", output), output


def test_a_hierarchical_exchange_where_horovod_permits_no_process_sets_is_refused(run_job):
    """On every rank, and collectives go on working."""
    code, output = run_job(
        """
        parameters, optimizer = make(["a"], exchange="hierarchical", ranks_per_host=1)
        try:
            step(parameters, optimizer)
        except ValueError as error:
            print("refused:", error)
        hvd.allreduce(torch.ones(1))
        """,
        environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "0"},
    )
    assert code == 0 and output.count("refused: hvd_sparse: ") == 2, output
    assert output.count('hvd.init(process_sets="dynamic"), or set HOROVOD_DYNAMIC_PROCESS_SETS=1') == 2, output


@pytest.mark.parametrize(
    "between",
    ["pass", *(pytest.param(f"compression.{call}()", marks=pytest.mark.exhaustive) for call in ("reset", "stats"))],
)
def test_horovod_may_be_restarted(run_job, between):
    """Before the first step; and within one: the presence check is lost, and states are loaded and summed all the same.

    With one process: two that start again may find each other's old addresses, by Horovod's own doing.
    """
    code, output = run_job(
        f"""
        def restart():
            hvd.shutdown()
            hvd.init()
            hvd.allreduce(torch.ones(1))

        weights = torch.nn.Parameter(torch.zeros(2000))
        compression = Compression.gradient_dropping([("weights", weights)], density=0.1)
        hvd.allreduce(torch.ones(1))
        restart()
        {between}
        weights.grad = torch.arange(2000.0)
        carried, context = compression.compress(weights.grad)
        reduced = compression.decompress(hvd.allreduce(carried, op=hvd.Sum), context)
        print("sent", int((reduced != 0).sum()))
        for is_summed in (False, True):
            compression = Compression.gradient_dropping([("weights", weights)], density=0.1)
            state = compression.state_dict()
            compression.compress(weights.grad)
            restart()
            compression.load_state_dict(compression.state_dict(summed=True) if is_summed else state)
            print("loaded", compression.state_dict()["step"])
        """,
        launcher=["horovodrun", "-np", "1", "--gloo"],  # MPI cannot be started twice
    )
    assert code == 0 and "sent 200" in output and output.count("loaded 0") == 2, output


FAILING = """
import horovod.torch as hvd
import torch

def test_fine():
    assert True

def test_one_rank_fails_while_the_others_wait():
    assert hvd.rank() != 1, "the reason to be shown"
    hvd.allreduce(torch.ones(1), name="never")

def test_never_reached():
    print("reached")
"""


def test_a_failure_on_one_rank_ends_the_test_job(tmp_path):
    """What tests/parallel/conftest.py promises: the rank's report, a non-zero exit, no hang."""
    here = os.path.dirname(os.path.abspath(__file__))
    shutil.copy(os.path.join(here, "..", "parallel", "conftest.py"), tmp_path)
    (tmp_path / "test_failing.py").write_text(FAILING)
    shared = {"PYTHONPATH": os.path.join(here, "..", "shared")}
    code, output = launch(
        [*mpirun(2), sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)], shared
    )
    assert code != 0
    assert "rank 1 of 2 failed" in output and "the reason to be shown" in output, output
    assert "reached" not in output.replace("never_reached", "")


IMPORTED = """
import horovod.{first}
import horovod.{last}
from hvd_sparse.{used} import Compression
import horovod.{used} as hvd
hvd.init()
try:
    Compression.topk([], density=0.1)
except RuntimeError as error:
    print(error)
except ValueError:
    print("there are no parameters")
"""


IN_ORDER = "there are no parameters"


@pytest.mark.parametrize(
    ("first", "last", "used", "says"),
    [
        ("torch", "tensorflow", "torch", "Import horovod.torch last"),
        pytest.param("torch", "tensorflow", "tensorflow", IN_ORDER, marks=pytest.mark.exhaustive),
        pytest.param("tensorflow", "torch", "torch", IN_ORDER, marks=pytest.mark.exhaustive),
    ],
)
def test_the_horovod_of_another_framework_that_was_imported_later_is_an_error(first, last, used, says):
    """Its process sets replace those of the first: PyTorch's optimizers exchange nothing then, and say nothing."""
    code, output = launch([sys.executable, "-c", IMPORTED.format(first=first, last=last, used=used)], KERAS_2)
    assert code == 0 and says in output, output
