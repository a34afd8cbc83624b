"""Simulated hosts on one machine, joined by a switch. Each is a network namespace with a link of a given rate.

The calling process moves to a separate network namespace, which is the switch. Each host is another namespace. A
process keeps it alive, and this process lives as long as a pipe from here is open. Jobs run in a process namespace,
which is kept alive in the same way: when its first process ends, the kernel ends all other processes. So the machine's
own network does not change, and nothing is left behind, however this program ends. It needs root, or a kernel that lets
users create namespaces.

Hosts share the machine's cores. Open MPI and Horovod wait in loops that call `sched_yield`. On separate machines this
has no cost, but here it would take half of the computing time. So `sched_yield` is replaced: ranks that wait sleep.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvd_sparse.plan import rate as bits_per_second

INSIDE = "HVD_SPARSE_SWITCH"  # set in the process that is in the switch's namespace
NETWORK = "10.99.0"
SWITCH = f"{NETWORK}.254"  # where hosts reach what runs beside the switch
WAYS_IN = (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])
SLEEP = """#include <time.h>
int sched_yield(void) { struct timespec wait = {0, 50000}; return nanosleep(&wait, 0); }
"""
TIMEOUT = 10.0  # seconds until a namespace must be there


def enter_switch() -> None:
    """Start this program again in a separate network namespace, unless it is in one. Exit if none can be created."""
    if os.environ.get(INSIDE):
        return
    missing = [tool for tool in ("unshare", "nsenter", "hostname", "ip", "tc", "cc") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"There is no {', '.join(missing)} on PATH. Install util-linux, iproute2 and a C compiler.")
    reasons = []
    for way in WAYS_IN:
        tried = subprocess.run([*way, "true"], capture_output=True, text=True)
        if tried.returncode == 0:
            os.environ[INSIDE] = "1"
            os.execvp(way[0], [*way, sys.executable, *sys.orig_argv[1:]])
        reasons.append(tried.stderr.strip())
    sys.exit(
        f"No network namespace can be made here: {'; '.join(reasons)}. Run it as root, or permit namespaces of users: "
        "sysctl kernel.unprivileged_userns_clone=1 (Debian), sysctl kernel.apparmor_restrict_unprivileged_userns=0 "
        "(Ubuntu); in a container, add the capability SYS_ADMIN."
    )


class Hosts:
    """Hosts 0 to count - 1, at addresses 10.99.0.1 and so on."""

    def __init__(self, count: int, ranks: int = 1):
        self.ranks = ranks  # ranks per host
        self.holders: list[subprocess.Popen] = []
        self._jobs: subprocess.Popen | None = None
        self.addresses = [f"{NETWORK}.{host + 1}" for host in range(count)]
        self._folder = tempfile.TemporaryDirectory(prefix="hosts")

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host."""
        spaces = f"/proc/{self.holders[host].pid}/ns"
        return ["nsenter", f"--net={spaces}/net", f"--uts={spaces}/uts", *command]

    def mpirun(self, command: Sequence[str]) -> list[str]:
        """Return the command line that starts a command with mpirun on host 0: once for each rank of each host."""
        network = f"{NETWORK}.0/24"
        options = ["-np", str(self.ranks * len(self.holders))]
        options += ["-H", ",".join(f"{address}:{self.ranks}" for address in self.addresses)]
        options += ["--bind-to", "none"]  # otherwise each host would bind its rank to the same core
        for name, value in {
            "plm_rsh_agent": str(self._agent()),
            "plm_rsh_no_tree_spawn": "1",  # only host 0 can reach the others with the agent
            "rtc": "^hwloc",  # the daemons would share a file with the machine's topology
            "mpi_yield_when_idle": "1",
            "btl": "tcp,self" if self.ranks == 1 else "vader,tcp,self",  # shared memory within a host
            "btl_vader_single_copy_mechanism": "none",
            "btl_tcp_if_include": network,
            "oob_tcp_if_include": network,
        }.items():
            options += ["-mca", name, value]
        own = ["env", f"TMPDIR={self._own_folder(0)}", f"LD_PRELOAD={self._sleep()}"]
        return self.job(0, [*own, "mpirun", *options, *command])

    def job(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host, as a process that ends when the hosts do."""
        among = ["nsenter", f"--pid=/proc/{self._jobs.pid}/ns/pid_for_children"]
        return [*among, *self.inside(host, command)]

    def _own_folder(self, host: int) -> Path:
        """Return a host's folder for temporary files. Daemons that start at once in the same folder may fail."""
        path = Path(self._folder.name) / str(host)
        path.mkdir(exist_ok=True)
        return path

    def shape(self, rate: str | None) -> None:
        """Limit all links to a rate, such as "1gbit", in both directions; None: no limit."""
        for host in range(len(self.holders)):
            self.limit(host, rate, rate)

    def limit(self, host: int, sends: str | None, receives: str | None) -> None:
        """Limit what a host sends, and what it receives, to a rate each; None: no limit."""
        ends = ((self.inside(host, ["tc"]), "eth0", sends), (["tc"], f"host{host}", receives))
        for command, device, rate in ends:
            subprocess.run([*command, "qdisc", "del", "dev", device, "root"], stderr=subprocess.DEVNULL)
            if rate is not None:
                burst = max(128_000, int(bits_per_second(rate) / 8 * 0.004))  # seconds between two ticks
                limit = ["rate", rate, "burst", str(burst), "latency", "50ms"]
                _run([*command, "qdisc", "add", "dev", device, "root", "tbf", *limit])

    def cut(self, host: int) -> None:
        """Cut a host's link: it loses what is sent either way until `mend`."""
        _run(["ip", "link", "set", f"host{host}", "down"])

    def mend(self, host: int) -> None:
        """Join a host to the switch again, with the rates it had."""
        _run(["ip", "link", "set", f"host{host}", "up"])

    def _sleep(self) -> Path:
        """Return the path of a library whose sched_yield sleeps for 50 us."""
        path = Path(self._folder.name) / "sleep.so"
        if not path.exists():
            _run(["cc", "-shared", "-fPIC", "-o", str(path), "-x", "c", "-"], SLEEP)
        return path

    def _agent(self) -> Path:
        """Return the path of a program that replaces ssh: ADDRESS COMMAND..."""
        path = Path(self._folder.name) / "agent"
        if not path.exists():
            cases = [
                f'{address}) TMPDIR={self._own_folder(host)} exec {" ".join(self.inside(host, ["sh"]))} -c "$*" ;;'
                for host, address in enumerate(self.addresses)
            ]
            path.write_text("\n".join(["#!/bin/sh", "host=$1", "shift", "case $host in", *cases, "esac", "exit 1", ""]))
            path.chmod(0o755)
        return path

    def start(self) -> None:
        """Create the namespaces and the links."""
        self._jobs = _hold("pid")
        _run(["ip", "link", "set", "lo", "up"])
        _run(["ip", "link", "add", "switch", "type", "bridge"])
        _run(["ip", "addr", "add", f"{SWITCH}/24", "dev", "switch"])
        _run(["ip", "link", "set", "switch", "up"])
        for host, address in enumerate(self.addresses):
            holder = _hold("net")
            self.holders.append(holder)
            port = f"host{host}"
            peer = ["peer", "name", "eth0", "netns", str(holder.pid)]
            _run(["ip", "link", "add", port, "type", "veth", *peer])
            _run(["ip", "link", "set", port, "master", "switch", "up"])
            for setting in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                _run(self.inside(host, ["ip", *setting]))
            _run(self.inside(host, ["ip", "link", "set", "lo", "up"]))
            _run(self.inside(host, ["hostname", port]))  # MPI treats ranks on hosts of equal names as local

    def stop(self) -> None:
        """End the jobs and the hosts, and remove the links at once. Can be called repeatedly."""
        for holder in (self._jobs, *self.holders):
            if holder is not None:
                holder.stdin.close()
                holder.wait()
        for link in ("switch", *(f"host{host}" for host in range(len(self.holders)))):
            subprocess.run(["ip", "link", "del", link], stderr=subprocess.DEVNULL)
        self._folder.cleanup()


@contextlib.contextmanager
def hosts(count: int, ranks: int = 1) -> Iterator[Hosts]:
    """Provide hosts with a number of ranks each, for the duration of the block. Call `enter_switch` first."""
    made = Hosts(count, ranks)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _run(command: Sequence[str], given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _hold(kind: str) -> subprocess.Popen:
    """Return a process that keeps a namespace ("net" or "pid") alive until its input is closed."""
    options = ["--pid", "--fork"] if kind == "pid" else ["--net", "--uts"]
    holder = subprocess.Popen(["unshare", *options, "cat"], stdin=subprocess.PIPE, start_new_session=True)
    end = time.monotonic() + TIMEOUT
    while not _is_own(holder.pid, "pid_for_children" if kind == "pid" else "net"):
        if time.monotonic() > end:
            raise RuntimeError("a host's namespaces were not made in time")
        time.sleep(0.005)
    return holder


def _is_own(pid: int, kind: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    except FileNotFoundError:  # the namespace has no process yet
        return False
