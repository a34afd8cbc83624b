"""The token that Horovod reduces instead of a gradient: its result tells which reduction the user requested."""

from functools import lru_cache

import torch

from hvd_sparse.torch.in_flight import extra_reference, extra_references
from hvd_sparse.units import REDUCTIONS

TOKEN_BYTES = 8


class Tokens:
    """The tokens of a step, float32[2] each: rows of one tensor, which all steps reuse.

    Allocating a tensor takes as long as all other Python code of a compress call.
    """

    def __init__(self):
        self._all = torch.empty(0, 2, dtype=torch.float32, device="cpu")
        self._token = torch.empty(2, dtype=torch.float32, device="cpu")
        self._rows: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []
        self._references: list[torch.Tensor] = []
        self._other_references: list[torch.Tensor] = []
        self._under_way = False

    def begin(self, rank: int, count: int) -> None:
        """Begin a step of `count` tokens; replace the tokens of an unfinished step, as Horovod may still write them."""
        if self._under_way or count != len(self._rows):
            self._all = torch.empty(count, 2, dtype=torch.float32, device="cpu")
            self._rows = list(self._all.unbind())
            self._references = extra_references(self._rows)
        self._token = torch.tensor([1.0, rank + 1.0], dtype=torch.float32, device="cpu")
        self._all.copy_(self._token)
        self._free = self._rows.copy()
        self._other_references.clear()
        self._under_way = True

    def take(self) -> torch.Tensor:
        """Return a token, [1, rank + 1]."""
        if self._free:
            return self._free.pop()
        token = self._token.clone()
        self._other_references.append(extra_reference(token))
        return token

    def end(self) -> None:
        """End a step: every token has been reduced and read."""
        self._under_way = False


def reduction_scale(token: torch.Tensor, world_size: int) -> float:
    """Return the factor for sums over ranks, from the reduced token, which each rank sent as [1, rank + 1].

    Sum gives [N, N (N + 1) / 2], and Average a multiple of it. Min, Max and Product do not: ValueError. A factor
    that differs from 1 or 1 / N only by the rounding of a predivide factor is replaced with the exact one.
    """
    return _scale(*token.tolist(), world_size)


@lru_cache(maxsize=16)
def _scale(ones: float, ids: float, world_size: int) -> float:
    if abs(ids - ones * (world_size + 1) / 2) > 1e-4 * abs(ids):
        raise ValueError(f"hvd_sparse: {REDUCTIONS}; the reduction turned the token into {[ones, ids]}")
    scale = ones / world_size
    for exact in (1.0, 1.0 / world_size):
        if abs(scale - exact) <= 1e-6 * exact:
            return exact
    return scale
