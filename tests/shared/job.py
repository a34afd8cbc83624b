"""A Horovod job for each test session. A failure on any rank ends the job with this rank's report; it never hangs.

Rank 0 prints like pytest without a job. The other ranks print only failures.
"""

import faulthandler
import gc
import os
import sys
import threading
import time

import pytest

LIMIT_SECONDS = 120  # per test; then every rank prints its stack and the test's name, and the job ends


class Job:
    """The plugin of a job. Register it last in the `pytest_configure` of a conftest.py.

    Args:
        hvd: Has `init`, `rank` and `size`.
        start: Called before each test; it returns when all ranks have called it.
    """

    def __init__(self, hvd, start):
        self.hvd, self.start = hvd, start
        self.console = sys.__stderr__  # the real standard error, which pytest does not capture

    def pytest_configure(self, config):
        self.hvd.init()
        capture = config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            self.console = os.fdopen(os.dup(2), "w")
        if self.hvd.rank() != 0:
            reporter = config.pluginmanager.getplugin("terminalreporter")
            reporter._tw._file = open(os.devnull, "w")

    def pytest_runtest_logreport(self, report):
        if report.failed and self.hvd.size() > 1:
            captured = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections)
            self.end(f"{report.nodeid} ({report.when})\n{report.longreprtext}{captured}")

    def pytest_collectreport(self, report):
        if report.failed and self.hvd.size() > 1:
            self.end(f"collecting {report.nodeid}\n{report.longreprtext}")

    def pytest_internalerror(self, excrepr):
        if self.hvd.size() > 1:
            self.end(str(excrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self):
        """Close the pipelines that tests left: the first rank to exit ends MPI, with Horovod, for all ranks."""
        for one in gc.get_objects():
            if type(one).__module__ == "hvd_sparse.model_parallel.channel" and type(one).__name__ == "Channel":
                one.close()
        self.start()

    def too_long(self, test):
        faulthandler.dump_traceback(self.console)
        self.end(f"{test} (call) still runs after {LIMIT_SECONDS} s; where it stands is above")

    def end(self, reason):
        """Print the reason and exit at once. Other ranks may wait in a collective; the launcher ends them."""
        self.console.write(f"\n=== rank {self.hvd.rank()} of {self.hvd.size()} failed: {reason}\n")
        self.console.flush()
        time.sleep(1.0)  # if other ranks fail in the same way, they print, too
        os._exit(1)

    @pytest.fixture(autouse=True)
    def together(self, request):
        """Start each test on all ranks at once. If it takes too long, end the job."""
        limit = threading.Timer(LIMIT_SECONDS, self.too_long, [request.node.nodeid])
        limit.daemon = True
        limit.start()
        # for code that waits and keeps Python's lock, so that no other thread of it runs
        faulthandler.dump_traceback_later(LIMIT_SECONDS + 10, exit=True, file=self.console)
        self.start()
        yield
        faulthandler.cancel_dump_traceback_later()
        limit.cancel()
