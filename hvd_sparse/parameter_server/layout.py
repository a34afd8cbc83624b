"""The offsets of a model's tensors in one flat vector, and each server's shard of this vector."""

import hashlib
import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

RENAMED = (
    "other names for the same shapes: with Keras, call tf.keras.backend.clear_session() before you build the model, or "
    "name its layers"
)


class Piece(NamedTuple):
    """A part of a tensor: elements [begin, end) of the flat vector. is_dense: it is always sent dense."""

    name: str
    begin: int
    end: int
    is_dense: bool


class ParameterLayout:
    """The order of tensors in a flat vector: first the tensors with at least `min_numel` elements, then the others.

    Both parts are sorted by name. Elements are selected in the first part; the second part is always sent dense.

    Args:
        shapes: {name: shape}.
        min_numel: Smaller tensors are sent dense.
        dense: Names of others that are.
        frozen: The parameters that do not change, as arrays in the model's order, which must be equal on all ranks.

    Raises:
        ValueError: There is no tensor, or a tensor has no elements.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        min_numel: int = 0,
        frozen: Iterable[np.ndarray] = (),
        dense: Collection[str] = (),
    ):
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        empty = [name for name, size in sizes.items() if size == 0]
        if not sizes or empty:
            remedy = ": set requires_grad=False (TensorFlow: trainable=False) for these" if empty else ""
            raise ValueError(f"there must be parameters, with elements; got {empty or 'none at all'}{remedy}")
        self._dense = {name for name, size in sizes.items() if size < min_numel or name in dense}
        self.names = sorted(sizes, key=lambda name: (name in self._dense, name))
        self.shapes = {name: tuple(shapes[name]) for name in self.names}
        ends = np.cumsum([sizes[name] for name in self.names])
        self.numel = int(ends[-1])
        self.begins = [0, *(int(end) for end in ends[:-1])]
        self.frozen = _checksum(frozen)

    def tensors(self) -> list[Piece]:
        """Return one piece for each tensor."""
        return self.pieces(0, self.numel)

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """Return the tensors, or parts of tensors, in [begin, end). Offsets count from the start of the flat vector."""
        found = []
        for name, start, stop in zip(self.names, self.begins, [*self.begins[1:], self.numel], strict=True):
            if start < end and stop > begin:
                found.append(Piece(name, max(start, begin), min(stop, end), name in self._dense))
        return found

    def shards(self, servers: int) -> list[tuple[int, int]]:
        """Return the shard [begin, end) of each server. Sizes differ by at most one element; tensors may be divided."""
        if not 1 <= servers <= self.numel:
            raise ValueError(f"servers must be in [1, {self.numel}], at most one an element; got {servers}")
        return [(s * self.numel // servers, (s + 1) * self.numel // servers) for s in range(servers)]

    def flatten(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the flat vector, float32[numel], of {name: array}."""
        return np.concatenate([np.asarray(arrays[name], np.float32).reshape(-1) for name in self.names])

    def split(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return {name: array}, the inverse of `flatten`. The arrays are views of the flat vector."""
        ends = self.begins[1:]
        return {
            name: part.reshape(self.shapes[name]) for name, part in zip(self.names, np.split(flat, ends), strict=True)
        }

    def digest(self) -> str:
        """Return a hash of the names, the shapes and their order, as 16 hexadecimal digits."""
        return hashlib.sha256(repr(list(self.shapes.items())).encode()).hexdigest()[:16]


def is_renamed(shapes: Mapping[str, object], others: Mapping[str, object]) -> bool:
    """Return whether two models, {name: shape}, have tensors of the same shapes under other names."""
    return {*shapes} != {*others} and sorted(map(str, shapes.values())) == sorted(map(str, others.values()))


def _checksum(arrays: Iterable[np.ndarray]) -> str:
    """Return the number of arrays, and a checksum of their values."""
    count = crc = 0
    for array in arrays:
        count, crc = count + 1, zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), crc)
    return f"{count}, checksum {crc:08x}"
