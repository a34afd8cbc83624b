"""The scopes of parameters on a CUDA device: nothing but the vote is read back, once a step; of thresholds, the counts.

A damaged payload cannot be raised there without waiting for the decoder: the next step's vote tells of it.

Buffers, messages, hints and votes lie on the device, and go to Horovod from there: it must have been built for CUDA.
The token, which has nothing to do with the data, stays on the CPU.

Where that cannot be, gradients are copied to the CPU, and the scope is the one that is there.
"""

import itertools
from collections.abc import Sequence
from dataclasses import astuple

import horovod.torch as hvd
import torch

from hvd_sparse.algorithms import Algorithm, SIDCo
from hvd_sparse.library import has_cuda
from hvd_sparse.threshold import SMALLEST
from hvd_sparse.torch import ops
from hvd_sparse.torch.model_scope import ModelScope
from hvd_sparse.torch.scope import Entry, Scope
from hvd_sparse.torch.tensor_scope import TensorScope
from hvd_sparse.torch.varying_scope import VaryingScope
from hvd_sparse.units import Units


class DeviceScope(Scope):
    """What all scopes do without waiting for the device while gradients come in."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._finite: dict[str, torch.Tensor] = {}  # bool, on the device, of this step's gradients

    @property
    def device(self) -> torch.device:
        """Where it works: where the parameters are."""
        return self.parameters.device

    def begin(self, step: int, units: Units) -> None:
        """Begin a step."""
        super().begin(step, units)
        self._finite = {}

    def _note(self, entry: Entry, finite: torch.Tensor) -> None:
        self._finite[entry.name] = finite

    def _note_all(self, entries: Sequence[Entry], finite: torch.Tensor) -> None:
        self._finite.update(zip((entry.name for entry in entries), finite.unbind(), strict=True))

    def _vote(self, name: str, entries: list[Entry]) -> None:
        flags = [self._finite[entry.name].double() for entry in entries if entry.name in self._finite]
        bad = len(flags) - torch.stack(flags).sum() if flags else torch.zeros((), device=self.device)
        if not self._votes:  # nothing is decoded between the votes of a step
            self.damage = ops.take_decode_status(bad)
        common = self._in_common()
        vote = torch.empty(2 + len(common), dtype=torch.float64, device=self.device)
        vote[0] = bad
        vote[1] = self.damage[0]
        for place, number in enumerate(common, 2):
            vote[place].fill_(number)  # not a copy from the host, which would wait for the device
        self._votes.append(self.exchange.allreduce(name, vote))
        self._collectives.append(self._votes[-1])
        self.traffic.count(payload_bytes=vote.numel() * vote.element_size())


class DeviceTensorScope(DeviceScope, TensorScope):
    """A selection of exactly k in each tensor."""


class DeviceModelScope(DeviceScope, ModelScope):
    """One selection in all tensors."""

    def _take_dense(self, entry: Entry, factor: float) -> torch.Tensor:
        with self.device:  # where zeros are made, in place of what does not train
            return super()._take_dense(entry, factor)


class DeviceVaryingScope(DeviceScope, VaryingScope):
    """What reaches a threshold in each tensor: how much that is, the host has to know, and waits for it."""

    def _select(self, entries: dict[str, Entry]) -> tuple[torch.Tensor, list[float], list[int], list[int]]:
        payloads, thresholds, counts = [], [], []
        for name, entry in entries.items():
            memory = self.memories[name]
            factor = memory.factor(entry.gradient, self.units)
            self._note(entry, memory.accumulate(entry.gradient, factor, self.units))
            threshold, k = astuple(self._plan_of(name))
            if k > 0:
                threshold = max(ops.select_threshold(memory.residual, k).item(), SMALLEST)
            indices, values = ops.filter_threshold(memory.residual, threshold)
            payloads.append(self._packed(name, indices, values))
            thresholds.append(threshold)
            counts.append(len(indices))
        sizes = [payload.numel() for payload in payloads]
        return torch.cat(payloads), thresholds, counts, [0, *itertools.accumulate(sizes[:-1])]

    def _packed(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        algorithm, segments = self.algorithm, self._segments_of((name,))
        if algorithm.values != "float32":
            values = ops.quantize(values, algorithm.values, algorithm.centre, indices, segments)
        n, k = self.parameters[name].numel(), max(1, len(indices))
        payload = self._buffer(self._payload_size(n, k, segments))
        ops.pack(indices, values, n, k, payload, segments=segments, **self._form())
        return payload

    def _sum(self, gathered: torch.Tensor, names: list[str], places: list[int], outs: list[torch.Tensor], scale: float):
        sizes, form = [self.parameters[name].numel() for name in names], self._form()
        found = ops.locate_payloads(gathered, sizes, self.ranks, **form, columns=self._columns(names))
        for place, out in zip(places, outs, strict=True):
            own = found[:, :, place].contiguous()
            ops.reduce_located(
                gathered, own, out.numel(), out, scale, **form, segments=self._segments_of((names[place],))
            )


LAYOUTS = {"tensor": DeviceTensorScope, "model": DeviceModelScope, "threshold": DeviceVaryingScope}


def device_layout(algorithm: Algorithm) -> type[DeviceScope] | None:
    """Return how a method lays out a step on a CUDA device; None where it works on the CPU."""
    return None if why_not(algorithm) else LAYOUTS[algorithm.layout]


def why_not(algorithm: Algorithm) -> str:
    """Return why a method does not work on CUDA devices here, nothing if it does."""
    if algorithm.layout not in LAYOUTS or isinstance(algorithm, SIDCo):  # SIDCo's fit is NumPy's
        return (
            f"Compression.{algorithm.name} has no kernels there. On the device there are dgc, samomentum, "
            "gradient_dropping, topk, dct and hard_threshold"
        )
    if not has_cuda("torch"):
        return (
            "hvd_sparse was built without CUDA. To compress on the device, install it again with "
            "HVD_SPARSE_WITH_CUDA=1 pip install --no-build-isolation ."
        )
    if not hvd.cuda_built():
        return (
            "Horovod was built without CUDA. To compress on the device, install it again with "
            "HOROVOD_GPU_OPERATIONS=NCCL pip install --no-cache-dir --force-reinstall horovod"
        )
    return ""


def crossing(algorithm: Algorithm) -> str:
    """Return the warning for parameters on a CUDA device whose gradients are compressed on the CPU."""
    return f"the parameters are on a CUDA device, but their gradients cross to the CPU and back: {why_not(algorithm)}"
