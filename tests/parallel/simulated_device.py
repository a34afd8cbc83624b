"""A tensor that claims to be on a CUDA device, and allows only PyTorch's copies to access its data.

It supports the operations that a fallback to the CPU needs: views, a copy to the CPU, and a copy from there. Any other
operator raises an error, including those of hvd_sparse. So tests can check where the work is done, but not that a GPU
would do its part.
"""

import torch

aten = torch.ops.aten


class DeviceTensor(torch.Tensor):
    """A wrapper of a CPU tensor, `held`."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device="cuda:0"
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:  # the method looks for a device first, its operator does not
            function = aten.copy_.default
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        if operator not in PERMITTED:
            raise NotImplementedError(f"{operator} on a device")
        return PERMITTED[operator](*args, **(kwargs or {}))


def to_the_cpu(tensor, *, device, dtype=None, **layout):
    """Copy to the CPU, which is the only place to go to."""
    assert device == torch.device("cpu"), device
    return tensor.held.to(dtype or tensor.dtype, copy=True)


def from_the_cpu(tensor, source):
    """Copy from the CPU, into the tensor's own storage."""
    assert source.device == torch.device("cpu"), source.device
    tensor.held.copy_(source)
    return tensor


def point_to(tensor, source):
    """Do what Horovod's optimizer does with a result: it must be on the gradient's device, and of its type."""
    assert isinstance(source, DeviceTensor) and source.dtype == tensor.dtype
    tensor.held = source.held
    return tensor


PERMITTED = {
    aten.detach.default: lambda tensor: DeviceTensor(tensor.held),
    aten.view.default: lambda tensor, shape: DeviceTensor(tensor.held.view(shape)),
    aten._to_copy.default: to_the_cpu,
    aten.copy_.default: from_the_cpu,
    aten.set_.source_Tensor: point_to,
}
