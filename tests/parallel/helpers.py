"""Parameters, and two ways to drive a compressor in tests."""

import contextlib
import hashlib
import os

import horovod.torch as hvd
import torch
from gradients import SHAPES, draw
from simulated_device import DeviceTensor


def make_parameters(shapes=SHAPES, dtype=torch.float32, seed=1):
    """Return {name: Parameter}, the same on every rank, fresh for each test: Horovod's hooks outlive its optimizer."""
    drawn = draw(shapes, step=0, rank=0, seed=seed)
    return {name: torch.nn.Parameter(torch.tensor(drawn[name]).to(dtype)) for name in shapes}


def distributed(parameters, compression=hvd.Compression.none, lr=0.1, optimizer=None, **options):
    """Return hvd.DistributedOptimizer around SGD.

    A process alone has its hooks too, as in an elastic job that starts with one worker: the compressor is then called
    by Horovod at any number of ranks.
    """
    inner = optimizer or torch.optim.SGD(list(parameters.values()), lr=lr)
    with alone_as_elastic():
        return hvd.DistributedOptimizer(
            inner, named_parameters=list(parameters.items()), compression=compression, **options
        )


@contextlib.contextmanager
def alone_as_elastic():
    before = os.environ.get("HOROVOD_ELASTIC")
    if hvd.size() == 1:
        os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("HOROVOD_ELASTIC", None)


def backward(parameters, gradients, order=None):
    """Give each parameter exactly this gradient, in one backward pass, hooks in this order of names; no others get one.

    Autograd runs the branches that were made last first. A frozen parameter has no branch.
    """
    names = [name for name in order or gradients if name in gradients and parameters[name].requires_grad]
    branches = [parameters[name].view_as(parameters[name]) for name in reversed(names)]
    torch.autograd.backward(branches, [as_gradient(parameters[name], gradients[name]) for name in reversed(names)])


def as_gradient(parameter, values):
    gradient = torch.tensor(values).to(parameter.dtype)
    return gradient if parameter.device.type == "cpu" else DeviceTensor(gradient)


def step(optimizer, parameters, gradients, order=None):
    """Make one optimizer step with these gradients."""
    optimizer.zero_grad()
    backward(parameters, gradients, order)
    optimizer.step()


class Caller:
    """What Horovod's optimizer is to a compressor: its op is that of the frame that calls `compress`."""

    def __init__(self, compressor, op=hvd.Sum, process_set=hvd.global_process_set):
        self._compression, self.op, self.process_set = compressor, op, process_set
        self.param_groups = []

    def compress(self, gradient):
        return self._compression.compress(gradient)


def drive(compressor, parameters, gradients, op=hvd.Sum, order=None, process_set=hvd.global_process_set):
    """Do what Horovod's optimizer does with a compressor, without it; return {name: reduced gradient}."""
    pending, caller = {}, Caller(compressor, op, process_set)
    for name in order or gradients:
        parameter = parameters[name]
        parameter.grad = as_gradient(parameter, gradients[name])
        carried, context = caller.compress(parameter.grad)
        pending[name] = hvd.allreduce_async(carried, name=f"drive.{name}", op=op, process_set=process_set), context
    return {
        name: compressor.decompress(hvd.synchronize(handle), context) for name, (handle, context) in pending.items()
    }


def memory_of(compressor, parameters, name, kind="residual"):
    """Return a buffer of this rank, float64[n]; zeros if it was never made."""
    buffers = compressor.state_dict()["memory"][name]
    return buffers.get(kind, torch.zeros(parameters[name].numel())).double()


def total(tensor, process_set=hvd.global_process_set):
    """Return the sum over the ranks, in float64."""
    wide = torch.as_tensor(tensor).detach().double().contiguous()
    return hvd.allreduce(wide, op=hvd.Sum, name="total", process_set=process_set)


def everywhere(value):
    """Return what each rank passed, as a list."""
    return hvd.allgather_object(value, name="everywhere")


def fingerprint(tensors):
    """Return a digest of the bits of {name: tensor}, uint8[1, 32]."""
    summary = hashlib.sha256()
    for name in sorted(tensors):
        data = tensors[name].detach().contiguous().view(-1)
        summary.update(f"{name} {data.dtype}".encode() + data.view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(summary.digest()), dtype=torch.uint8).view(1, -1)


def assert_ranks_agree(tensors, process_set=hvd.global_process_set):
    """Assert that every rank has the same bits."""
    prints = hvd.allgather(fingerprint(tensors), name="fingerprint", process_set=process_set)
    assert (prints == prints[0]).all(), f"ranks differ: {prints[:, :4].tolist()}"


def assert_alive():
    """Assert that collectives still work on all ranks."""
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="alive").tolist() == [hvd.size()] * 3
