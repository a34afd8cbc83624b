"""One Horovod job a session. A failure on any rank ends the job with that rank's report, never in a hang.

Rank 0 prints as pytest always does; the others print only what failed.
"""

import faulthandler
import os
import sys
import time

import pytest

LIMIT_SECONDS = 120  # of one test; then every rank shows where it stands, and the job ends


class Job:
    """What a conftest.py registers as a plugin, in its own `pytest_configure`, which is to be the last one.

    Args:
        hvd: Has `init`, `rank` and `size`.
        start: Called before each test; it returns when all ranks are there.
    """

    def __init__(self, hvd, start):
        self.hvd, self.start = hvd, start
        self.console = sys.__stderr__  # the real standard error, whatever pytest captures

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

    def end(self, reason):
        """Print why and exit at once: the others may wait in a collective, and mpirun or horovodrun ends them."""
        self.console.write(f"\n=== rank {self.hvd.rank()} of {self.hvd.size()} failed: {reason}\n")
        self.console.flush()
        time.sleep(1.0)  # ranks that fail alike print too
        os._exit(1)

    @pytest.fixture(autouse=True)
    def together(self):
        """Start each test on all ranks at once; end the job, not hang, if it takes too long."""
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=self.console)
        self.start()
        yield
        faulthandler.cancel_dump_traceback_later()
