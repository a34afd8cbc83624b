"""The boundary of DCT-MP as a module: keeps the largest activations of each row, forward and backward.

Source: Dynamic Communication Thresholding (Gupta et al., 2021), section 2.2 and algorithm 2. Differences from it:
"topk" keeps exactly round(density * f) elements of a row, and a seeded hash orders ties; NaN is kept first, so that it
stays visible; with "laplace", evaluation uses a running mean of thresholds (the paper leaves it open).
"""

import torch

from hvd_sparse.model_parallel.boundary import BoundarySettings, Threshold
from hvd_sparse.torch import row_ops as ops
from hvd_sparse.traffic import BoundaryStats


class ThresholdBoundary(torch.nn.Module):
    """Keep the largest magnitudes of each row, and in backward the gradient of the same elements (DCT-MP).

    Put it at any split of a network, also in one process to study the effect; in a `Pipeline`, pass it as `boundary`.
    Evaluation uses the thresholded network, too: with "laplace" the running threshold, a buffer; until that is
    estimated, all elements are kept. "laplace" never keeps zeros. Source: Dynamic Communication Thresholding (Gupta et
    al., 2021), section 2.2 and Algorithm 2.

    Input: float32, float64, float16 or bfloat16 of any shape with rows. The output has the same type and shape.

    Args:
        density: Part of a row's elements to keep, in (0, 1]; 1 keeps everything.
        threshold: "topk": exactly max(1, round(density * f)) of the f elements of each row. "laplace": elements that
            reach -b * ln(density), with b the mean magnitude of the row: one pass, no sort, and a density that drifts
            (see `stats`).
        start_dim: Dimensions before it are rows; the others are a row's f elements. 1: a row is a sample; -1: a vector
            of the last dimension.
        momentum: Momentum of the running threshold, as in batch normalization.
        seed: Seed of the order among equal magnitudes.

    Raises:
        ValueError: A value is out of range; the input has no dimension before `start_dim`, or none from it on; or it
            has no features.
        TypeError: A value has the wrong type.
    """

    def __init__(
        self,
        density: float,
        threshold: Threshold = "topk",
        *,
        start_dim: int = 1,
        momentum: float = 0.1,
        seed: int = 0,
    ):
        super().__init__()
        self.settings = BoundarySettings(density, threshold, start_dim, momentum, seed).checked()
        self.register_buffer("running_threshold", torch.zeros((), dtype=torch.float32))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("_last", torch.zeros(2, dtype=torch.int64), persistent=False)  # kept, of how many
        self.register_buffer("_total", torch.zeros(2, dtype=torch.int64), persistent=False)

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Return the kept activations, and zero for the others."""
        if self.settings.density == 1.0:
            self._count(activations.numel(), activations.numel())
            return activations
        if not activations.is_floating_point():
            raise ValueError(f"activations must be of real numbers, got {activations.dtype}")
        mask = self.mask(activations).view(activations.shape)
        return torch.where(mask, activations, activations.new_zeros(()))

    def mask(self, activations: torch.Tensor) -> torch.Tensor:
        """Return the mask, bool[B, f], and count the kept elements, like `forward`."""
        settings = self.settings
        with torch.no_grad():
            rows = activations.detach().reshape(settings.row_shape(activations.shape))
            if settings.density == 1.0:
                self._count(rows.numel(), rows.numel())
                return torch.ones_like(rows, dtype=torch.bool)
            if settings.threshold == "topk":
                mask, thresholds = ops.select_top_k_rows(rows, settings.kept(rows.shape[1]), settings.seed)
            elif self.training:
                thresholds = ops.laplace_threshold_rows(rows, settings.density)
                mask = ops.filter_threshold_rows(rows, thresholds)
            else:
                thresholds = self.running_threshold.double().view(1)
                mask = ops.filter_threshold_rows(rows, thresholds)
            known = rows.shape[0] * settings.kept(rows.shape[1]) if settings.threshold == "topk" else None
            self._count(torch.count_nonzero(mask) if known is None else known, rows.numel())
            if self.training and rows.shape[0] > 0:
                self._learn(thresholds)
            return mask

    def stats(self) -> BoundaryStats:
        """Return the occupancy, the part of elements kept: of the last batch, and as mean_occupancy of all batches.

        Both count training and evaluation (of a pipeline, training alone: `Pipeline.stats`). The threshold is the
        running mean over training batches of the rows' mean threshold, and `batches` their number. In a `Pipeline`,
        batches are micro-batches. Waits for the device.
        """
        (kept, numel), (all_kept, all_numel) = self._last.tolist(), self._total.tolist()
        return {
            "occupancy": kept / max(1, numel),
            "mean_occupancy": all_kept / max(1, all_numel),
            "threshold": float(self.running_threshold),
            "batches": int(self.batches),
        }

    def extra_repr(self) -> str:
        """Return the settings as text, for `repr`."""
        return self.settings.describe()

    def _learn(self, thresholds: torch.Tensor) -> None:
        """Move the running threshold towards a batch's, the mean of its finite ones; the first is taken as it is."""
        if _is_recomputing():
            return
        finite = thresholds.isfinite()
        mean = torch.where(finite, thresholds, 0.0).sum() / finite.sum().clamp(min=1)
        mean = mean.to(self.running_threshold.dtype)
        part = torch.where(self.batches == 0, 1.0, self.settings.momentum).to(mean.dtype)
        self.running_threshold.add_(part * (mean - self.running_threshold))
        self.batches.add_(1)

    def _count(self, kept: torch.Tensor | int, numel: int) -> None:
        if _is_recomputing():
            return
        self._last[0].fill_(kept)  # not a copy from the host, which would wait for the device
        self._last[1].fill_(numel)
        self._total.add_(self._last)


def _is_recomputing() -> bool:
    """Return whether this runs in backward: activation checkpointing, of a batch that has been counted already."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
