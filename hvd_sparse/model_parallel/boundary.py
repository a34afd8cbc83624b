"""The settings of a boundary, for all frameworks."""

import math
from typing import Literal, NamedTuple, get_args

from hvd_sparse.checks import check_choice, check_number, checked_density, checked_integer
from hvd_sparse.wire import top_k_count

Threshold = Literal["topk", "laplace"]
THRESHOLDS = get_args(Threshold)


class BoundarySettings(NamedTuple):
    """The settings of a `ThresholdBoundary`, checked by `checked`."""

    density: float
    threshold: Threshold
    start_dim: int
    momentum: float
    seed: int

    def checked(self) -> "BoundarySettings":
        """Return the settings with Python's numbers; ValueError or TypeError says which argument is wrong."""
        density = checked_density("density", self.density)
        check_choice("threshold", self.threshold, THRESHOLDS)
        check_number("momentum", self.momentum, "in (0, 1]", lambda value: 0.0 < value <= 1.0)
        start_dim, seed = checked_integer("start_dim", self.start_dim), checked_integer("seed", self.seed, 0)
        if start_dim == 0:
            raise ValueError("start_dim must not be 0: at least the first dimension counts samples; got 0")
        return self._replace(density=density, start_dim=start_dim, momentum=float(self.momentum), seed=seed)

    def kept(self, columns: int) -> int:
        """Return the number of a row's elements that "topk" keeps: round(density * f), half rounded up, at least 1."""
        return top_k_count(columns, self.density)

    def row_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return (B, f): dimensions before start_dim are rows. ValueError if there are none of either, or f = 0."""
        ndim = len(shape)
        start = self.start_dim + ndim if self.start_dim < 0 else self.start_dim
        if not 1 <= start < ndim:
            raise ValueError(
                f"activations must have dimensions before and from start_dim={self.start_dim} on, got shape "
                f"{list(shape)}"
            )
        rows, columns = math.prod(shape[:start]), math.prod(shape[start:])
        if columns == 0:
            raise ValueError(f"activations must have at least one feature, got shape {list(shape)}")
        return rows, columns

    def describe(self) -> str:
        """Return the settings as text, for `repr`."""
        return f"density={self.density:g}, threshold={self.threshold!r}, start_dim={self.start_dim}"
