"""Comparisons of training on the CPU and on a GPU, for jobs of either framework."""

import numpy as np
import parity_job
from gradients import draw


def report(wrong):
    """Return the result of a comparison: how many cases it had, and what was wrong."""
    return {"cases": len(wrong), "wrong": [one for one in wrong if one]}


def compare(case, expected, found):
    """Return what differs between the CPU and the GPU in one case; an empty string if nothing does."""
    if not expected[0]:
        return f"{case}: nothing was sent"
    if b"".join(found[0]) != b"".join(expected[0]):
        first = next(
            (at for at, pair in enumerate(zip(expected[0], found[0], strict=False)) if pair[0] != pair[1]), None
        )
        return f"{case}: payload {first} of {len(expected[0])} (on the GPU {len(found[0])}) is not that of the CPU"
    wrong = [name for name, value in expected[1].items() if found[1][name].tobytes() != value.tobytes()]
    return f"{case}: parameters {wrong} are not those of the CPU" if wrong else ""


def compare_parity(train, cases, prepare=lambda: None, devices=("cpu", "cuda")):
    """Compare cases of parity_job. prepare: called before the GPU trains. devices: names of the CPU and of the GPU."""
    initial = {name: value.astype(np.float32) for name, value in draw(parity_job.SHAPES, 0, 0, seed=9).items()}
    expected = {case: train(*what, initial, devices[0]) for case, what in cases.items()}
    prepare()
    found = {case: train(*what, initial, devices[1]) for case, what in cases.items()}
    return report([compare(case, expected[case], found[case]) for case in cases])
