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
    """The hooks of a conftest.py: its names that begin with `pytest_` are to be bound to the methods here."""

    def __init__(self, hvd):
        self.hvd = hvd
        self.console = sys.__stderr__  # the real standard error, whatever pytest captures

    @pytest.hookimpl(trylast=True)
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

    def limit(self):
        """Give what follows its time; end the job, not hang, if it takes too long."""
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=self.console)

    @staticmethod
    def unlimit():
        faulthandler.cancel_dump_traceback_later()
