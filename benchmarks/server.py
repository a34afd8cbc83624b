"""Measure the cost of a push at a parameter server, without a network: `make bench-server`.

Workers push in turn. Each push is a payload of density 0.01 at random places, and the answer has all elements that
changed since the worker's last push, or with a pull density the largest differences. The comparison is a server whose
tracker passes over all elements in NumPy, as an earlier version did. The answers of both must be equal, byte for byte.
Seconds are CPU time of the thread. With several servers, one is timed with its shard. A second table has the pushes a
second of one server in several threads, by the clock. The last line of output is one JSON object. Its `answers` is a
checksum of all answers, which is the same on every machine.
"""

import argparse
import itertools
import json
import threading
import time
import zlib

import numpy as np
from entries import draw_entries

from hvd_sparse.parameter_server import METHODS, protocol
from hvd_sparse.parameter_server.layout import ParameterLayout
from hvd_sparse.parameter_server.methods import Method
from hvd_sparse.parameter_server.protocol import Form, Kind, Message
from hvd_sparse.parameter_server.server import Server, introduction
from hvd_sparse.parameter_server.updates import Update, groups_of, pack, piece_segments, rounded, select
from hvd_sparse.wire import top_k_count

DRAWN = 8  # number of different pushes


class PassOverAll:
    """A tracker that compares all clocks, or subtracts all elements, for each answer."""

    def __init__(self, parameters: np.ndarray, method: Method, layout: ParameterLayout):
        pieces = layout.pieces(0, layout.numel)
        self.form = Form.DIFFERENCES if method.is_mirrored else Form.VALUES
        self.nbytes, self._parameters, self._method = 0, parameters, method
        self._changed, self._mirrors = np.zeros(parameters.size, np.uint32), {}
        self._groups, self._segments = groups_of(pieces, 0, method), piece_segments(pieces, 0)

    def join(self, worker: int) -> None:
        """Create a worker's mirror."""
        self._mirrors[worker] = self._parameters.copy() if self._method.is_mirrored else None

    def apply(self, update: Update, clock: int) -> None:
        """Subtract an update, and record its clock."""
        self._parameters[update.at] -= update.values
        if not self._method.is_mirrored:
            self._changed[update.at] = clock

    def answer(self, worker: int, have: int) -> tuple[int, np.ndarray]:
        """Return k and a message with the payload."""
        if self._method.is_mirrored:
            difference = self._parameters - self._mirrors[worker]
            chosen = select(difference, self._groups, self._method.pull_density)
            update = rounded(Update(chosen, difference[chosen]), self._method, "float32", self._segments)
            self._mirrors[worker][update.at] += update.values
        else:
            indices = np.flatnonzero(self._changed > have)
            update = Update(indices, self._parameters[indices])
        k, body = pack(update, self._parameters.size, self._method.coding, "float32", self._segments)
        encoded = protocol.frame(body.size)
        encoded[protocol.HEADER_BYTES :] = body
        return k, encoded


class Pushes:
    """The pushes of workers to a server of n elements and to the comparison server, and the workers' clocks."""

    def __init__(self, method: Method, n: int, density: float, workers: int, compares: bool = True):
        layout = ParameterLayout({"weight": (n,)}, method.min_numel)
        count = 2 if compares else 1
        self.servers = [Server(layout, (0, n), method, np.zeros(n, np.float32), workers) for _ in range(count)]
        for server in self.servers[1:]:
            server._tracker = PassOverAll(server.parameters, method, layout)
        segments = piece_segments(layout.pieces(0, n), 0)
        k = top_k_count(n, density)
        drawn = [Update(*draw_entries(n, k, seed)) for seed in range(DRAWN)]
        self.bodies = [pack(update, n, method.coding, method.values, segments) for update in drawn]
        self.clocks, self.sequences = [0] * workers, [0] * workers
        self.answers = 0
        text = protocol.as_body("\n".join(introduction(layout, method)))
        for server in self.servers:
            for worker in range(workers):
                server.handle(protocol.encode(Message(Kind.HELLO, worker, 1, body=text)), worker)

    def push(self, worker: int) -> list[float]:
        """Let a worker push; return the seconds of each server."""
        self.sequences[worker] += 1
        k, body = self.bodies[(worker + self.sequences[worker]) % DRAWN]
        place = (worker, 1, self.sequences[worker], self.clocks[worker], k)
        data = protocol.encode(Message(Kind.PUSH, *place, body=body))
        seconds, answers = [], []
        for server in self.servers:
            start = time.thread_time()
            [(_, answer)] = server.handle(data, worker)
            seconds.append(time.thread_time() - start)
            answers.append(answer.tobytes())
        reply = protocol.decode(answer)
        if reply.kind != Kind.REPLY or len(set(answers)) > 1:
            raise RuntimeError(f"the servers answered differently, or with no reply: {reply}")
        self.answers = zlib.crc32(answers[0], self.answers)
        self.clocks[worker] = reply.clock
        return seconds


def measure(args: argparse.Namespace, pull_density: float | None, servers: int, workers: int) -> dict:
    """Time pushes; return a row of the table."""
    method = METHODS["dgs"](density=args.density, pull_density=pull_density)
    pushes = Pushes(method, args.parameters // servers, args.density, workers)
    warm = 2 * workers
    seconds = np.array([pushes.push(number % workers) for number in range(warm + args.pushes)])[warm:]
    ours, passes = np.median(seconds, axis=0)
    place = {"pull_density": pull_density, "servers": servers, "workers": workers}
    times = {"milliseconds": 1e3 * ours, "milliseconds_pass_over_all": 1e3 * passes, "ratio": passes / ours}
    server = pushes.servers[0]
    rate = {"pushes_per_second": 1.0 / ours, "bytes_over_parameters": server.nbytes / (4 * server.numel)}
    return place | times | rate | {"answers": pushes.answers}


def measure_threads(args: argparse.Namespace, pull_density: float | None, threads: int, workers: int) -> dict:
    """Time pushes to the threads of one server, all at work at the same time; return a row of the second table."""
    method = METHODS["dgs"](density=args.density, pull_density=pull_density)
    count = args.parameters // threads
    shards = [Pushes(method, count, args.density, workers, compares=False) for _ in range(threads)]
    start = threading.Barrier(threads + 1)

    def push(shard: Pushes) -> None:
        """Let all workers push twice, and then `args.pushes` times in turn."""
        for number in range(2 * workers):
            shard.push(number % workers)
        start.wait()
        for number in range(args.pushes):
            shard.push(number % workers)

    pushing = [threading.Thread(target=push, args=(shard,)) for shard in shards]
    for thread in pushing:
        thread.start()
    start.wait()
    begin = time.perf_counter()
    for thread in pushing:
        thread.join()
    rate = args.pushes / (time.perf_counter() - begin)
    return {"pull_density": pull_density, "threads": threads, "workers": workers, "pushes_per_second": rate}


def print_threads(args: argparse.Namespace) -> list[dict]:
    """Print the second table; return its rows."""
    print("\n| pull density | workers | " + " | ".join(f"pushes/s, {count} threads" for count in args.threads) + " |")
    print("|---|---:|" + "---:|" * len(args.threads))
    rows = []
    for pull_density, workers in itertools.product((None, args.density), args.workers):
        own = [measure_threads(args, pull_density, threads, workers) for threads in args.threads]
        rates = " | ".join(f"{row['pushes_per_second']:.0f}" for row in own)
        print(f"| {pull_density or 'all'} | {workers} | {rates} |", flush=True)
        rows += own
    return rows


def main() -> None:
    """Time each number of workers, of servers and of threads, and each kind of answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000, help="of all servers (default: %(default)s)")
    parser.add_argument("--density", type=float, default=0.01, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16], help="(default: %(default)s)")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4], help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: %(default)s)")
    parser.add_argument("--pushes", type=int, default=32, help="of each (default: %(default)s)")
    args = parser.parse_args()
    print("| pull density | servers | workers | ms | ms, pass over all | ratio | bytes over parameters' |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    results = []
    for pull_density in (None, args.density):
        for servers in args.servers:
            for workers in args.workers:
                results.append(measure(args, pull_density, servers, workers))
                row = results[-1]
                numbers = f"{row['milliseconds']:.2f} | {row['milliseconds_pass_over_all']:.2f} | {row['ratio']:.2f}"
                where = f"{pull_density or 'all'} | {servers} | {workers}"
                print(f"| {where} | {numbers} | {row['bytes_over_parameters']:.2f} |", flush=True)
    threads = print_threads(args)
    print(json.dumps({"benchmark": "server", "parameters": args.parameters, "results": results, "threads": threads}))


if __name__ == "__main__":
    main()
