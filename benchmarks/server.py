"""How many pushes a second one parameter server answers, without any network: `python benchmarks/server.py`.

Workers push in turn, each a payload of density 0.01 at places of its own, and get what has changed since their last
push: all of it, and with a pull density the largest differences. The last line is one JSON object; `answers` is a
checksum of all answers, the same on every machine.
"""

import argparse
import json
import time
import zlib

import numpy as np
from entries import draw_entries

from hvd_sparse.parameter_server import protocol
from hvd_sparse.parameter_server.layout import ParameterLayout
from hvd_sparse.parameter_server.methods import Method
from hvd_sparse.parameter_server.protocol import Kind, Message
from hvd_sparse.parameter_server.server import Server, introduction
from hvd_sparse.parameter_server.updates import Update, pack, segments_of
from hvd_sparse.torch.asynchronous import METHODS
from hvd_sparse.wire import top_k_count

DRAWN = 8  # different pushes


class Pushes:
    """Messages of workers to a server of n elements, and the clocks that they have seen."""

    def __init__(self, method: Method, n: int, density: float, workers: int):
        layout = ParameterLayout({"weight": (n,)}, method.min_numel)
        self.server = Server(layout, (0, n), method, np.zeros(n, np.float32), workers)
        segments = segments_of(layout.pieces(0, n), 0)
        k = top_k_count(n, density)
        drawn = [Update(*draw_entries(n, k, seed)) for seed in range(DRAWN)]
        self.bodies = [pack(update, n, method.coding, method.values, segments) for update in drawn]
        self.clocks, self.sequences = [0] * workers, [0] * workers
        self.answers = 0
        text = protocol.as_body("\n".join(introduction(layout, method)))
        for worker in range(workers):
            self.server.handle(protocol.encode(Message(Kind.HELLO, worker, 1, body=text)), worker)

    def push(self, worker: int) -> float:
        """Let a worker push; return the seconds that the server took."""
        self.sequences[worker] += 1
        k, body = self.bodies[(worker + self.sequences[worker]) % DRAWN]
        place = (worker, 1, self.sequences[worker], self.clocks[worker], k)
        data = protocol.encode(Message(Kind.PUSH, *place, body=body))
        start = time.perf_counter()
        [(_, answer)] = self.server.handle(data, worker)
        seconds = time.perf_counter() - start
        reply = protocol.decode(answer)
        if reply.kind != Kind.REPLY:
            raise RuntimeError(f"the server answered with {reply}")
        self.answers = zlib.crc32(answer.tobytes(), self.answers)
        self.clocks[worker] = reply.clock
        return seconds


def main() -> None:
    """Time each number of workers, and each kind of answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000, help="(default: %(default)s)")
    parser.add_argument("--density", type=float, default=0.01, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16], help="(default: %(default)s)")
    parser.add_argument("--pushes", type=int, default=64, help="of each (default: %(default)s)")
    args = parser.parse_args()
    results = []
    for pull_density in (None, args.density):
        for workers in args.workers:
            method = METHODS["dgs"](density=args.density, pull_density=pull_density)
            pushes = Pushes(method, args.parameters, args.density, workers)
            seconds = [pushes.push(number % workers) for number in range(workers + args.pushes)][workers:]
            median = float(np.median(seconds))
            results.append({"pull_density": pull_density, "workers": workers, "pushes_per_second": 1 / median})
            results[-1] |= {"milliseconds": 1e3 * median, "answers": pushes.answers}
            print(json.dumps(results[-1]), flush=True)
    print(json.dumps({"parameters": args.parameters, "results": results}))


if __name__ == "__main__":
    main()
