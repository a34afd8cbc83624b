"""One of two ranks that share a GPU, or the only one: python ddp_job.py parity|events|nccl|train RANK RANKS PORT.

    parity   trains every case of parity_job on the CPU and on the GPU, and compares payload bytes and parameters
    events   does so in steps with NaN, unused parameters, reloaded states and a reset, of every method
    nccl     does what `parity` does for one rank, whose GPU communicates by NCCL and nothing else
    train    trains a convolutional network on the GPU for 1,000 steps

test_gpu_ddp.py starts it. The last line of the output of each rank is one JSON object.
"""

import json
import sys
import time
from datetime import timedelta

import numpy as np
import parity_job
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gradients import SHAPES, draw
from terms import Terms
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.torch.ddp import Compression

STEPS, BATCH = 1000, 16
METHODS = {
    "dgc": {"density": 0.01, "momentum": 0.9, "warmup": 100},
    "gradient_dropping": {"density": 0.01, "exchange": "reduce_scatter"},
    "micro": {"density": 0.01},
    "sidco": {"density": 0.01},
}


SMALL = {"density": 0.05, "min_numel": 10}
EVENTFUL = [
    ("dgc", {**SMALL, "momentum": 0.9}),
    ("dgc", {**SMALL, "momentum": 0.9, "scope": "model"}),
    ("gradient_dropping", {**SMALL, "values": "int2"}),
    ("gradient_dropping", {**SMALL, "exchange": "reduce_scatter"}),
    ("samomentum", SMALL),
    ("topk", SMALL),
    ("dct", {**SMALL, "lifespan": 3}),
    ("hard_threshold", {"value": 2.0, "min_numel": 10}),
    ("sidco", SMALL),
    ("micro", SMALL),
    ("cltk", {**SMALL, "values": "float16"}),
    ("random_k", {**SMALL, "values": "int1"}),
]
WAITING = ("micro", "cltk", "random_k", "sidco", "dct")  # methods in which the host waits for the device


def train_cases(cases, device):
    """Return {case: its payloads and its parameters} after training each case on a device."""
    initial = {name: value.astype(np.float32) for name, value in draw(parity_job.SHAPES, 0, 0, seed=9).items()}
    return {case: parity_job.train_ddp(*what, initial, device) for case, what in cases.items()}


def compare(case, expected, found):
    """Return what differs between the CPU and the GPU in one case; an empty string if nothing does."""
    if not expected[0]:
        return f"{case}: nothing was sent"
    if b"".join(found[0]) != b"".join(expected[0]):
        first = next((at for at, pair in enumerate(zip(*expected, strict=False)) if pair[0] != pair[1]), None)
        return f"{case}: payload {first} of {len(expected[0])} (on the GPU {len(found[0])}) is not that of the CPU"
    wrong = [name for name, value in expected[1].items() if found[1][name].tobytes() != value.tobytes()]
    return f"{case}: parameters {wrong} are not those of the CPU" if wrong else ""


def run_parity(prepare=lambda: None):
    """Compare the cases of this tier, and all of the methods in WAITING. prepare: called before the GPU trains."""
    cases = {case: what for case, what in parity_job.ALL_CASES.items() if what[0] in WAITING} | parity_job.CASES
    expected = train_cases(cases, "cpu")
    prepare()
    found = train_cases(cases, "cuda")
    wrong = [compare(case, expected[case], found[case]) for case in cases]
    return {"cases": len(cases), "wrong": [one for one in wrong if one]}


def use_nccl():
    """Replace the process group by one of this rank alone, over NCCL, which accepts one rank for each GPU."""
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), world_size=1, rank=0)


class Events:
    """A model whose steps have a frozen parameter, a NaN, a parameter without a gradient, and a reloaded state."""

    def __init__(self, method, settings, device):
        self.model = Terms(draw(SHAPES, 0, 0, seed=9)).to(device)
        self.compression = getattr(Compression, method)(self.model.named(), **settings)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.002, find_unused_parameters=True)
        self.compression.register(self.ddp)

    def step(self, number):
        """Take a step, and return the reduced gradients as bytes."""
        given = draw(SHAPES, number, dist.get_rank(), seed=3)
        if number == 2:
            given["head.weight"] = np.where(np.arange(500) == 7, np.nan, given["head.weight"])
        if number == 3:
            del given["body.bias"]
        if number == 5:
            self.compression.load_state_dict(self.compression.state_dict())
        if number == 7:
            self.compression.load_state_dict(self.compression.state_dict(summed=True))
        if number == 9:
            self.compression.reset()
        self.ddp.zero_grad()
        self.ddp(given).backward()
        found = {name: one.grad for name, one in self.model.named()}
        return {name: None if one is None else one.numpy(force=True).tobytes() for name, one in found.items()}


def compare_events(method, settings):
    """Return where the reduced gradients of the GPU are not those of the CPU; an empty string if nowhere."""
    expected, found = (Events(method, settings, device) for device in ("cpu", "cuda"))
    for number in range(12):
        wanted, got = expected.step(number), found.step(number)
        wrong = [name for name, one in wanted.items() if got[name] != one]
        if wrong and number != 2:  # a skipped step: NaN, of any bits
            return f"{method}, step {number}: {wrong}"
    states = [one.compression.state_dict(summed=True)["memory"] for one in (expected, found)]
    wrong = [
        name
        for name, buffers in states[0].items()
        if any(not torch.equal(one, states[1][name][kind].cpu()) for kind, one in buffers.items())
    ]
    return f"{method}: the state of {wrong}" if wrong else ""


def run_events():
    """Compare all methods in EVENTFUL."""
    wrong = [compare_events(method, settings) for method, settings in EVENTFUL]
    return {"cases": len(EVENTFUL), "wrong": [one for one in wrong if one]}


def make_model():
    """Return two convolutions and two linear layers for 8 x 8 images."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())
    return nn.Sequential(features, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))


def ranks_agree(model):
    """Return whether all ranks have the same bits in all parameters."""
    own = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).view(torch.uint8).cpu()
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    return all(torch.equal(own, other) for other in others)


def train(method, settings):
    """Train 1,000 steps of scikit-learn's digits; return accuracy, time, and whether the ranks agree."""
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, labels = (images.float() / 16).view(-1, 1, 8, 8).cuda(), labels.cuda()
    test, rest = slice(0, 360), slice(360, None)
    model = make_model().cuda()
    compression = getattr(Compression, method)(model.named_parameters(), **settings)
    wrapped = DistributedDataParallel(model)
    compression.register(wrapped)
    momentum = 0.0 if "momentum" in settings else 0.9
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.02, momentum=momentum)
    order = torch.Generator().manual_seed(dist.get_rank())
    start, agreed = time.perf_counter(), []
    for step in range(STEPS):
        batch = torch.randint(len(labels) - 360, (BATCH,), generator=order).cuda()
        optimizer.zero_grad()
        F.cross_entropy(wrapped(images[rest][batch]), labels[rest][batch]).backward()
        optimizer.step()
        if step % 100 == 99:
            agreed.append(ranks_agree(model))
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = 100 * (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    total = compression.stats()["total"]
    return {
        "accuracy": round(accuracy, 2),
        "ranks_agree": all(agreed),
        "steps_per_second": round(STEPS / seconds, 1),
        "device": compression._step.device.type,
        "ratio": round(total["ratio"], 1),
    }


def main():
    """Run as one rank."""
    what, (rank, ranks, port) = sys.argv[1], map(int, sys.argv[2:])
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, timedelta(seconds=60), world_size=ranks, rank=rank)
    if what == "train":
        result = {method: train(method, settings) for method, settings in METHODS.items()}
    else:
        result = {"parity": run_parity, "events": run_events, "nccl": lambda: run_parity(use_nccl)}[what]()
    dist.destroy_process_group()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
