"""Tells in the first step if the ranks' weights differ, as each rank would train a different model."""

import hashlib
from collections.abc import Mapping

import torch

from hvd_sparse.frames import warn
from hvd_sparse.torch.collectives import Collectives

DIFFER = (
    "hvd_sparse: the ranks' weights differ before the first step, the first ones in {}: each rank trains another "
    "model. Once the model is built or loaded: hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
)
SPAN = 1 << 22  # elements that are added at a time: on the CPU, PyTorch makes a copy of them, 8 bytes each
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsCheck:
    """Compares the weights of one compressor, once, and never in an elastic job, whose ranks come and go.

    Args:
        parameters: The compressor's parameters, by name.
        collectives: Those of the compressor.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], collectives: Collectives):
        self._parameters, self._collectives = parameters, collectives
        self._is_done = False

    def compare(self) -> None:
        """Warn on the first rank if weights differ, naming a parameter; where all ranks are in the same first step."""
        if self._is_done or self._collectives.is_elastic():
            return
        self._is_done, own, size = True, _sums(self._parameters), self._collectives.size()
        digest = torch.frombuffer(bytearray(hashlib.sha256(own.numpy().tobytes()).digest()), dtype=torch.int64)
        digests = self._collectives.allgather("weights.digest", digest).wait().view(size, -1)
        if bool((digests == digests[0]).all()):
            return
        sums, differ = self._collectives.allgather("weights.sums", own).wait().view(size, 2, -1), set()
        for place, name in enumerate(sorted(self._parameters)):
            values, trains = sums[:, 0, place], sums[:, 1, place].bool()
            if values[trains].unique().numel() > 1:
                differ.add(name)
        if differ and self._collectives.is_first():
            warn(DIFFER.format(next(name for name in self._parameters if name in differ)))


def _sums(parameters: Mapping[str, torch.nn.Parameter]) -> torch.Tensor:
    """Return the sum of the bits of each parameter, and whether it trains, in the order of names, int64[2, parameters].

    Sums of integers do not depend on the order, so that equal weights have equal sums on any machine.
    """
    sums = torch.zeros(2, len(parameters), dtype=torch.int64, device="cpu")
    for place, (_, parameter) in enumerate(sorted(parameters.items())):
        # A subclass may hold other parts on each rank, such as a DTensor, or data that only it can read.
        if parameter.requires_grad and type(parameter) in (torch.Tensor, torch.nn.Parameter):
            bits = parameter.detach().reshape(-1).view(INTEGERS[parameter.element_size()])
            sums[0, place] = sum(part.sum(dtype=torch.int64) for part in bits.split(SPAN))
            sums[1, place] = 1
    return sums
