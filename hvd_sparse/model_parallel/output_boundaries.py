"""The boundaries of a stage's outputs: those that were given, and those that are made when an output is first seen."""

import abc
from collections.abc import Mapping, MutableMapping
from typing import Any

from hvd_sparse.model_parallel import tree


class OutputBoundaries(abc.ABC):
    """The part of a pipeline that has its boundaries, by the names of outputs."""

    _boundary: Any  # the argument
    boundaries: MutableMapping[str, Any]

    @abc.abstractmethod
    def _made(self, boundary):
        """Return the boundary for an argument, which is a boundary or a density. Raise an error if it is wrong."""

    def _make_boundaries(self) -> None:
        """Make the boundaries that have a name; the one of all is made for each output when that is first seen."""
        if isinstance(self._boundary, Mapping):
            for name, boundary in self._boundary.items():
                if boundary is not None:
                    self.boundaries[tree.module_name(name)] = self._made(boundary)
        elif self._boundary is not None:
            self._made(self._boundary)

    def _boundary_of(self, name: str):
        """Return the boundary of an output; None if it crosses whole. No name: no output."""
        key = tree.module_name(name)
        if name and self._boundary is not None and not isinstance(self._boundary, Mapping):
            if key not in self.boundaries:
                self.boundaries[key] = self._made_for_all()
        return self.boundaries[key] if key in self.boundaries else None

    def _made_for_all(self):
        """Return a boundary for one more output: the given one for the first, later ones with its settings.

        So each output has its own running threshold and statistics.
        """
        boundary = self._made(self._boundary)
        if any(boundary is other for other in self.boundaries.values()):
            boundary = self._made(type(boundary)(**boundary.settings._asdict()))
        return boundary
