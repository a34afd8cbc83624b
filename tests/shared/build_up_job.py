"""Record for each method how many elements the sum over ranks has, and how many each rank selected.

    mpirun -np 8 python build_up_job.py FILE

FILE gets {method: [[elements of the union, elements of each rank, ...] for each step]}. k is 200 of 20,000; there are
20 steps of drawn gradients.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gradients import draw

N, K, STEPS = 20_000, 200, 20
SHAPES = {"only": (N,)}
METHODS = {
    "topk": {"density": K / N},
    "dgc": {"density": K / N, "momentum": 0.0},
    "hard_threshold": {},
    "cltk": {"density": K / N},
    "micro": {"density": K / N},
}


def first_threshold():
    """Return the threshold that K elements of rank 0's first gradient reach, as a constant for hard_threshold."""
    return float(np.sort(np.abs(draw(SHAPES, 0, 0)["only"]))[-K])


def listen(compression):
    """Return a function that returns the number of elements that this rank selected in the last step."""
    selection, named = getattr(compression._step.codec, "selection", None), []
    if selection is None:  # all selected elements were sent
        return lambda: round(compression.stats()["step"]["density"] * N)
    original = selection.select_indices

    def indices(*arguments):
        named.append(original(*arguments))
        return named[-1]

    selection.select_indices = indices
    return lambda: len(named[-1])


def main():
    import horovod.torch as hvd
    import torch

    from hvd_sparse.torch import Compression

    hvd.init()
    torch.set_num_threads(1)
    results = {}
    for name, settings in METHODS.items():
        if name == "hard_threshold":
            settings = {"value": first_threshold()}
        parameter = torch.nn.Parameter(torch.zeros(N))
        compression = getattr(Compression, name)([(name, parameter)], **settings)
        chosen = listen(compression)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=0.0), named_parameters=[(name, parameter)], compression=compression
        )
        rows = []
        for step in range(STEPS):
            optimizer.zero_grad()
            (parameter * torch.tensor(draw(SHAPES, step, hvd.rank())["only"], dtype=torch.float32)).sum().backward()
            optimizer.step()
            counts = hvd.allgather(torch.tensor([chosen()]), name=f"{name}.counts").tolist()
            rows.append([int(torch.count_nonzero(parameter.grad)), *counts])
        results[name] = rows
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
