"""One Horovod job a session. A failure on any rank ends the job with that rank's report, never in a hang.

    mpirun -np 3 --oversubscribe python -m pytest -x -q tests/parallel
    horovodrun -np 2 --gloo python -m pytest -x -q tests/parallel

Rank 0 prints as pytest always does; the others print only what failed.
"""

import faulthandler
import os
import sys
import time

import pytest
import torch

os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")  # for the tests of process sets
import horovod.torch as hvd

LIMIT_SECONDS = 120  # of one test; then every rank shows where it stands, and the job ends


class Console:
    """The real standard error, whatever pytest captures."""

    file = sys.__stderr__


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    # the tests have a lone process's hooks called too, see helpers.distributed
    config.addinivalue_line("filterwarnings", "ignore:Horovod calls no compressor with one process")
    hvd.init()
    torch.set_num_threads(1)
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        Console.file = os.fdopen(os.dup(2), "w")
    if hvd.rank() != 0:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = open(os.devnull, "w")


def pytest_runtest_logreport(report):
    if report.failed and hvd.size() > 1:
        captured = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections)
        end_job(f"{report.nodeid} ({report.when})\n{report.longreprtext}{captured}")


def pytest_collectreport(report):
    if report.failed and hvd.size() > 1:
        end_job(f"collecting {report.nodeid}\n{report.longreprtext}")


def pytest_internalerror(excrepr):
    if hvd.size() > 1:
        end_job(str(excrepr))


def end_job(reason):
    """Print why and exit at once: the other ranks may wait in a collective, and mpirun or horovodrun ends them."""
    Console.file.write(f"\n=== rank {hvd.rank()} of {hvd.size()} failed: {reason}\n")
    Console.file.flush()
    time.sleep(1.0)  # ranks that fail alike print too
    os._exit(1)


@pytest.fixture(autouse=True)
def together():
    """Start each test on all ranks at once; end the job, not hang, if one takes too long."""
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=Console.file)
    hvd.barrier()
    torch.manual_seed(0)
    yield
    faulthandler.cancel_dump_traceback_later()
