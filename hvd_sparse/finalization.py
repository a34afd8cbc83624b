"""Keeps MPI running as long as sessions and pipelines use it; tells whether they end with an error.

Horovod stops MPI if it has started it: on every rank, in its background thread, as soon as the first rank ends, while
the others may still train. MPI_Finalize first calls the delete functions of the attributes of MPI_COMM_SELF, and MPI
works until they return.
"""

import functools
import sys
import threading
import time
import weakref

NAP = 0.01  # seconds between two looks
STILL_OPEN = (
    "hvd_sparse: MPI ends while a session or pipeline is open: close() it before hvd.shutdown() or MPI.Finalize()"
)
_users: weakref.WeakSet = weakref.WeakSet()  # the mailboxes that are open
_begun: list[bool] = []  # not empty once MPI_Finalize has been called


def keep_running(user, mpi) -> None:
    """Let MPI_Finalize wait for `let_go(user)`, or until nothing refers to `user`. mpi: `mpi4py.MPI`."""
    _guard(mpi)
    _users.add(user)


def let_go(user) -> None:
    """Let MPI_Finalize wait for `user` no longer."""
    _users.discard(user)


def is_end(error: BaseException | None) -> bool:
    """Return whether an exception ends a run without an error: a generator's end, `sys.exit()` or `sys.exit(0)`.

    Any other argument of `sys.exit`, also an empty text, makes the process's status other than 0.
    """
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def is_ending(mpi) -> bool:
    """Return whether MPI_Finalize has been called. mpi: `mpi4py.MPI`."""
    return bool(_begun) or mpi.Is_finalized()


@functools.cache
def _guard(mpi) -> None:
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=_wait), True)


def _wait(*_) -> None:
    """Return when nothing uses MPI any more, or when this process itself waits for the end of MPI.

    Say so if something still uses it then: other ranks will wait for messages of this one without a word.
    """
    _begun.append(True)
    while _users and not _is_own_end():
        time.sleep(NAP)
    if _users:
        print(STILL_OPEN, file=sys.stderr)


def _is_own_end() -> bool:
    """Return whether a user called MPI.Finalize, or a thread is in `hvd.shutdown`, as at the interpreter's end."""
    return threading.current_thread() is threading.main_thread() or any(
        (frame.f_code.co_name, frame.f_globals.get("__name__")) == ("shutdown", "horovod.common.basics")
        for frame in sys._current_frames().values()
    )
