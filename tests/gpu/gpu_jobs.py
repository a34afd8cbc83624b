"""What the jobs of both hosts, ddp_job.py and horovod_job.py, compare and train on a GPU.

A host is described by functions: `train(method, settings, initial, device)` trains a case of parity_job, and `wrap`
gives a model to the host.
"""

import time

import numpy as np
import parity_job
import torch
import torch.nn.functional as F
from gradients import SHAPES, draw
from parity import compare_parity, report
from terms import Terms
from torch import nn

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


def compare_cases(train, prepare=lambda: None):
    """Compare the cases of this tier, and all of the methods in WAITING. prepare: called before the GPU trains."""
    waiting = {case: what for case, what in parity_job.ALL_CASES.items() if what[0] in WAITING}
    return compare_parity(train, waiting | parity_job.CASES, prepare)


class Events:
    """A model whose steps have a NaN, a parameter without a gradient, reloaded states and a reset.

    wrap(model, compression) returns a function that reduces the gradients of its argument into the model's.
    """

    def __init__(self, compression, settings, rank, device, wrap):
        self.rank = rank
        self.model = Terms(draw(SHAPES, 0, 0, seed=9)).to(device)
        self.compression = compression(self.model.named(), **settings)
        self.reduce = wrap(self.model, self.compression)

    def step(self, number):
        """Take a step, and return the reduced gradients as bytes."""
        given = draw(SHAPES, number, self.rank, seed=3)
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
        self.reduce(given)
        found = {name: one.grad for name, one in self.model.named()}
        return {name: None if one is None else one.numpy(force=True).tobytes() for name, one in found.items()}


def compare_states(method, states):
    """Return where the buffers of two states differ; an empty string if nowhere."""
    wrong = [
        name
        for name, buffers in states[0].items()
        if any(not torch.equal(one, states[1][name][kind].cpu()) for kind, one in buffers.items())
    ]
    return f"{method}: the state of {wrong}" if wrong else ""


def compare_events(front, rank, wrap):
    """Compare all methods in EVENTFUL: the reduced gradients of each step, and the states at the end.

    front: the host's Compression. wrap: see Events.
    """
    wrong = []
    for method, settings in EVENTFUL:
        make = getattr(front, method)
        expected, found = (Events(make, settings, rank, device, wrap) for device in ("cpu", "cuda"))
        for number in range(12):
            wanted, got = expected.step(number), found.step(number)
            differing = [name for name, one in wanted.items() if got[name] != one]
            if differing and number != 2:  # a skipped step: NaN, of any bits
                wrong.append(f"{method}, step {number}: {differing}")
                break
        else:
            states = [one.compression.state_dict(summed=True)["memory"] for one in (expected, found)]
            wrong.append(compare_states(method, states))
    return report(wrong)


def make_model():
    """Return two convolutions and two linear layers for 8 x 8 images, on the GPU."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())
    head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(features, head).cuda()


def bytes_of(model):
    """Return all parameters of a model as one uint8 tensor on the CPU."""
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).view(torch.uint8).cpu()


def train_digits(front, rank, wrap, gather):
    """Train each of METHODS for 1,000 steps on scikit-learn's digits; return {method: what its training gave}.

    wrap(model, optimizer, compression) returns the model and the optimizer of the host; gather(tensor) returns the
    tensors of all ranks.
    """
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, labels = (images.float() / 16).view(-1, 1, 8, 8).cuda(), labels.cuda()
    results = {}
    for method, settings in METHODS.items():
        model = make_model()
        compression = getattr(front, method)(model.named_parameters(), **settings)
        momentum = 0.0 if "momentum" in settings else 0.9
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)
        wrapped, optimizer = wrap(model, sgd, compression)
        order = torch.Generator().manual_seed(rank)
        start, agreed = time.perf_counter(), []
        for step in range(STEPS):
            batch = 360 + torch.randint(len(labels) - 360, (BATCH,), generator=order).cuda()
            optimizer.zero_grad()
            F.cross_entropy(wrapped(images[batch]), labels[batch]).backward()
            optimizer.step()
            if step % 100 == 99:
                own = bytes_of(model)
                agreed.append(all(torch.equal(own, other) for other in gather(own)))
        seconds = time.perf_counter() - start
        with torch.no_grad():
            accuracy = 100 * (model(images[:360]).argmax(1) == labels[:360]).float().mean().item()
        results[method] = {
            "accuracy": round(accuracy, 2),
            "ranks_agree": all(agreed),
            "steps_per_second": round(STEPS / seconds, 1),
            "device": compression._step.device.type,
            "ratio": round(compression.stats()["total"]["ratio"], 1),
        }
    return results
