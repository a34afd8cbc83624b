"""scope="tensor" for parameters on a CUDA device: nothing but the vote is read back, once a step.

Buffers, messages, hints and votes lie on the device, and go to Horovod from there: it must have been built for CUDA
tensors, as for any gradient on a GPU. The token, which has nothing to do with the data, stays on the CPU.
"""

import torch

from hvd_sparse.algorithms import Algorithm, SparsificationAwareMomentum
from hvd_sparse.library import has_cuda
from hvd_sparse.torch import ops
from hvd_sparse.torch.scope import Entry
from hvd_sparse.torch.tensor_scope import TensorScope
from hvd_sparse.wire import LOW_BITS


class DeviceTensorScope(TensorScope):
    """A selection of exactly k in each tensor, without waiting for the device while gradients come in."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._kept_hints: dict[tuple[str, ...], torch.Tensor] = {}  # float64[members, 3], of those who share a call
        self._finite: dict[str, torch.Tensor] = {}  # bool, on the device, of this step's gradients

    def begin(self, step: int) -> None:
        """Begin a step."""
        super().begin(step)
        self._finite = {}

    def _look(self, entry: Entry) -> None:
        self._finite[entry.name] = ops.all_finite(entry.gradient)

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.parameters.device)

    def _compress(self, entries: dict[str, Entry], *lists, **options) -> None:
        members = tuple(entries)
        if members not in self._kept_hints:
            self._kept_hints[members] = ops.new_hints(len(members), self.parameters.device)
        _, finite = ops.accumulate_bucket_hinted(*lists, hints=self._kept_hints[members], **options)
        self._finite.update(zip(members, finite.unbind(), strict=True))

    def _vote(self, name: str, entries: list[Entry]) -> None:
        flags = [self._finite[entry.name].double() for entry in entries if entry.name in self._finite]
        bad = len(flags) - torch.stack(flags).sum() if flags else torch.zeros((), device=self.parameters.device)
        vote = torch.full((3,), float(self.step), dtype=torch.float64, device=self.parameters.device)
        vote[0] = bad
        vote[2] *= self.step
        self._votes.append(self.exchange.allreduce(name, vote))
        self._collectives.append(self._votes[-1])
        self.traffic.count(payload_bytes=vote.numel() * vote.element_size())


def device_layout(algorithm: Algorithm) -> type[DeviceTensorScope]:
    """Return how a method lays out a step on a CUDA device; ValueError where it has none yet."""
    if not has_cuda("torch"):
        raise ValueError(
            "the parameters are on a CUDA device, but hvd_sparse was built without CUDA: install it again with "
            "HVD_SPARSE_WITH_CUDA=1 pip install --no-build-isolation ."
        )
    if algorithm.layout != "tensor":
        raise ValueError(
            "on CUDA devices there are dgc, gradient_dropping and topk with scope='tensor' so far; got "
            f"{algorithm.name} laid out by {algorithm.layout}"
        )
    if isinstance(algorithm, SparsificationAwareMomentum):
        raise ValueError(f"on CUDA devices {algorithm.name} has no kernels yet: dgc has a momentum there")
    if algorithm.values in LOW_BITS:
        raise ValueError(f"on CUDA devices values are float32, float16 or bfloat16 so far, got {algorithm.values}")
    return DeviceTensorScope
