"""The configuration check of one compressor: all ranks compare their settings before they exchange payloads."""

import threading

from hvd_sparse.members import NOT_ADDED
from hvd_sparse.torch.exchange import Exchange, Pending

LOST = (
    "hvd_sparse: hvd.init() was called again, without hvd.shutdown(), while ranks compared the settings of this "
    "compression, and Horovod lost the answer. Call it once, before compressions are built"
)
_lock = threading.Lock()  # over the starts of all checks


class ConfigurationCheck:
    """Compares settings with all ranks, once in each incarnation of the backend and after `forget`."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._passed_in: object | None = None  # the incarnation in which all ranks had the same settings
        self._forgotten_in: object | None = None  # the incarnation in which `forget` was called after that
        self._started: tuple[object, Pending | None] | None = None  # a check and its incarnation; None if lost

    @property
    def has_passed(self) -> bool:
        """Whether all ranks had the same settings, in this incarnation or an earlier one, since `forget`."""
        return self._passed_in is not None

    def is_due(self) -> bool:
        """Return whether the ranks have to compare settings before the next step."""
        return self._passed_in is not self._exchange.collectives.incarnation()

    def is_to_start(self) -> bool:
        """Return whether comparing is neither in flight nor done, and possible now."""
        collectives = self._exchange.collectives
        is_started = self._started is not None and self._started[0] is collectives.incarnation()
        return not is_started and self.is_due() and collectives.can_start()

    def start(self, lines: list[str], step: int) -> None:
        """Start comparing settings with all ranks, unless that is in flight, done, or not possible yet."""
        with _lock:
            if not self.is_to_start():
                return
            now = self._exchange.collectives.incarnation()
            try:
                self._started = now, self._exchange.start_check(lines, step)
            except ValueError:  # the name is in use: Horovod still runs, and hvd.init() has dropped what was in flight
                if self._started is None:
                    raise
                self._started = now, None

    def finish(self, lines: list[str]) -> int:
        """Wait for all ranks, and return the largest step of any rank.

        ValueError on every rank if settings differ; RuntimeError if a rank is missing.
        """
        if self._started is None:
            raise RuntimeError(NOT_ADDED)
        now, pending = self._started
        if pending is None:
            raise RuntimeError(LOST)
        if self._forgotten_in is now:
            self._exchange.announce()
            gathered = self._exchange.wait_between_steps(pending)
        else:
            gathered = pending.wait_in_time()
        with _lock:
            self._started, self._forgotten_in = None, None
            self._passed_in = now
        try:
            return self._exchange.finish_check(gathered, lines)
        except ValueError:
            self._passed_in = None
            raise

    def forget(self) -> None:
        """Make the ranks compare settings again before the next step."""
        if self._passed_in is not None:  # not its truth: Horovod's is an empty dictionary between steps
            self._forgotten_in = self._passed_in
        self._passed_in = None
