"""One rank of a timed run of an asynchronous method. `asynchronous.py` starts it on every host.

Workers sleep for a given time per gradient, because hosts share cores. Rank 0 prints one JSON line.
"""

import argparse
import json
import time

import numpy as np
import torch

from hvd_sparse.torch.asynchronous import METHODS, connect


def main() -> None:
    """Push and pull for a number of seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
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
    session.worker.step = args.lifespan  # thresholds are kept from the start; the first ones let too much through
    random = np.random.default_rng(session.rank)
    gradients = [torch.from_numpy(random.standard_normal(args.numel // 8, np.float32)) for _ in parameters]

    def step():
        end = time.perf_counter() + args.step_seconds
        gradients.append(gradients.pop(0))
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):  # residuals do a random walk
            parameter.grad = gradient * float(random.choice([-1.0, 1.0]))
        time.sleep(max(0.0, end - time.perf_counter()))
        optimizer.step()

    step()  # after this step, all workers have joined
    before, start = session.stats()["all"]["pushes"], time.perf_counter()
    while time.perf_counter() < start + args.seconds:
        step()
    pushes = session.stats()["all"]["pushes"] - before
    if session.rank == 0:
        print(json.dumps({"pushes_per_second": pushes / (time.perf_counter() - start)}), flush=True)
    session.close()


if __name__ == "__main__":
    main()
