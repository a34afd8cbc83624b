"""The token that Horovod reduces in place of a gradient: the result tells the requested reduction."""

from functools import lru_cache

import torch

from hvd_sparse.torch.in_flight import held, held_all

TOKEN_BYTES = 8
REDUCTIONS = "op must be hvd.Average or hvd.Sum"


class Tokens:
    """The tokens of a step, float32[2] each: rows of one tensor, that serve in every step.

    To make a tensor takes as long as everything else that a compress does in Python.
    """

    def __init__(self):
        self._all = torch.empty(0, 2)
        self._rows: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []
        self._held: list[torch.Tensor] = []
        self._held_besides: list[torch.Tensor] = []
        self._under_way = False

    def begin(self, rank: int, count: int) -> None:
        """Begin a step of so many tokens; those of a step that was given up are Horovod's, which may still write."""
        if self._under_way or count != len(self._rows):
            self._all = torch.empty(count, 2)
            self._rows = list(self._all.unbind())
            self._held = held_all(self._rows)
        self._token = torch.tensor([1.0, rank + 1.0])
        self._all.copy_(self._token)
        self._free = self._rows.copy()
        self._held_besides.clear()
        self._under_way = True

    def take(self) -> torch.Tensor:
        """Return a token, [1, rank + 1]."""
        if self._free:
            return self._free.pop()
        token = self._token.clone()
        self._held_besides.append(held(token))
        return token

    def end(self) -> None:
        """End a step: every token has been reduced and read."""
        self._under_way = False


def reduction_scale(token: torch.Tensor, ranks: int) -> float:
    """Return what the sum over ranks is to be multiplied with, as the token, sent as [1, rank + 1], tells.

    Sum makes [N, N (N + 1) / 2] of it, Average a multiple of that; Min, Max and Product do not: ValueError.
    Rounding of a predivide factor is snapped off.
    """
    return _scale(*token.tolist(), ranks)


@lru_cache(maxsize=16)
def _scale(ones: float, ids: float, ranks: int) -> float:
    if abs(ids - ones * (ranks + 1) / 2) > 1e-4 * abs(ids):
        raise ValueError(f"hvd_sparse: {REDUCTIONS}; the reduction turned the token into {[ones, ids]}")
    scale = ones / ranks
    for exact in (1.0, 1.0 / ranks):
        if abs(scale - exact) <= 1e-6 * exact:
            return exact
    return scale
