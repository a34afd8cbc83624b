"""One rank of a timed run of an asynchronous method. `asynchronous.py` starts it on every host.

Workers sleep for a given time per gradient, because hosts share cores. Rank 0 prints `WARM` when all workers have made
their first pushes, after which the network can be limited, and last one JSON line.
"""

import argparse
import json
import time

import numpy as np
import torch
from records import WARM

from hvd_sparse.torch.asynchronous import METHODS, connect

PAUSE = 3.0  # seconds for the network to change


def main() -> None:
    """Push and pull for a number of seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--workers", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="pushes of a worker before (default: %(default)s)")
    parser.add_argument("--density", type=float, default=0.01, help="of pushes, and of answers but for dct_async")
    parser.add_argument("--lifespan", type=int, default=1, help="of dct_async (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {} if args.method == "asgd" else {"density": args.density}
    if args.method == "dct_async":
        settings["lifespan"] = args.lifespan
    elif settings:
        settings["pull_density"] = args.density
    parameters = {f"layer{part}": torch.nn.Parameter(torch.zeros(args.numel // 8)) for part in range(8)}
    session = connect(parameters.items(), METHODS[args.method](**settings), servers=args.servers)
    if not session.is_worker:
        session.serve()
        return
    optimizer = session.optimizer(lr=1e-3)
    random = np.random.default_rng(session.rank)
    gradients = [torch.from_numpy(random.standard_normal(args.numel // 8, np.float32)) for _ in parameters]

    def step(seconds):
        end = time.perf_counter() + seconds
        gradients.append(gradients.pop(0))
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):  # residuals do a random walk
            parameter.grad = gradient * float(random.choice([-1.0, 1.0]))
        time.sleep(max(0.0, end - time.perf_counter()))
        optimizer.step()

    def sent():
        """Return how many pushes all workers have made, and what part of the elements this one's pushes had in sum."""
        stats = session.stats()
        return stats["all"]["pushes"], stats["density_up"] * stats["pushes"], stats["pushes"]

    step(args.step_seconds)
    for _ in range(args.first):
        step(0.0)
    while sent()[0] < args.workers * (1 + args.first):
        time.sleep(0.1)
    if session.rank == 0:
        print(WARM, flush=True)
    session.worker.step = max(session.worker.step, args.lifespan)  # from here on, a threshold is kept for a life-span
    time.sleep(PAUSE * (args.first > 0))
    before, start = sent(), time.perf_counter()
    while time.perf_counter() < start + args.seconds:
        step(args.step_seconds)
    pushes, elements, own = (now - then for now, then in zip(sent(), before, strict=True))
    if session.rank == 0:
        rate = pushes / (time.perf_counter() - start)
        print(json.dumps({"pushes_per_second": rate, "sent": elements / own}), flush=True)
    session.close()


if __name__ == "__main__":
    main()
