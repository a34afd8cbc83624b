"""Shapes and types of the native operators' results, for torch.compile and fake tensors."""

import torch

from hvd_sparse.partition import SKETCH_BINS


def register(with_cuda: bool) -> None:
    """Register the fakes of all operators of a loaded library; some are there only if it was built with CUDA."""
    _register_selection_fakes()
    _register_row_fakes()
    _register_wire_fakes()
    _register_bucket_fakes()
    if with_cuda:
        _register_cuda_fakes()


def _empty(values: torch.Tensor, shape: tuple, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a tensor of this shape where `values` is."""
    return values.new_empty(shape, dtype=dtype or values.dtype)


def _register_selection_fakes() -> None:
    """Register the fakes of the operators that accumulate and select."""
    fake = torch.library.register_fake

    @fake("hvd_sparse::accumulate")
    def _(gradient, residual, *rule):
        return _empty(gradient, (), torch.bool)

    @fake("hvd_sparse::select_top_k")
    def _(values, k, seed, threshold_hint):
        return _empty(values, (k,), torch.int64), _empty(values, (k,)), _empty(values, (2,), torch.float64)

    @fake("hvd_sparse::filter_threshold")
    def _(values, threshold):
        count = torch.library.get_ctx().new_dynamic_size()
        return _empty(values, (count,), torch.int64), _empty(values, (count,))

    @fake("hvd_sparse::select_threshold")
    def _(values, k, method, sample_fraction, seed):
        return _empty(values, (), torch.float64)

    @fake("hvd_sparse::all_finite")
    def _(values):
        return _empty(values, (), torch.bool)


def _register_row_fakes() -> None:
    """Register the fakes of the operators on rows."""
    fake = torch.library.register_fake

    @fake("hvd_sparse::select_top_k_rows")
    def _(values, k, seed):
        return _empty(values, values.shape, torch.bool), _empty(values, values.shape[:1], torch.float64)

    @fake("hvd_sparse::laplace_threshold_rows")
    def _(values, density):
        return _empty(values, values.shape[:1], torch.float64)

    @fake("hvd_sparse::filter_threshold_rows")
    def _(values, thresholds):
        return _empty(values, values.shape, torch.bool)


def _register_wire_fakes() -> None:
    """Register the fakes of the operators that code and decode."""
    fake = torch.library.register_fake

    @fake("hvd_sparse::locate_payloads")
    def _(gathered, ns, ranks, coding, value_dtype, channels):
        return torch.empty((2, ranks, len(ns)), dtype=torch.int64, device="cpu")  # wherever the payloads lie

    @fake("hvd_sparse::reduce_located")
    def _(gathered, places, n, out, scale, coding, value_dtype, segments):
        return None

    @fake("hvd_sparse::pack")
    def _(indices, values, n, k, out, coding, value_dtype, segments):
        return None

    @fake("hvd_sparse::unpack")
    def _(payload, n, k, coding, value_dtype, segments):
        count = torch.library.get_ctx().new_dynamic_size()
        wide = torch.float64 if value_dtype == "float64" else torch.float32
        return _empty(payload, (count,), torch.int64), _empty(payload, (count,), wide)

    @fake("hvd_sparse::reduce_payloads")
    def _(gathered, offset, n, k, out, scale, coding, value_dtype, segments):
        return None

    @fake("hvd_sparse::quantize")
    def _(values, value_dtype, level, indices, segments):
        return torch.empty_like(values)


def _register_bucket_fakes() -> None:
    """Register the fakes of the operators on buckets."""
    fake = torch.library.register_fake

    @fake("hvd_sparse::accumulate_bucket")
    def _(gradients, *arguments):
        out, joint = arguments[9], arguments[13]
        selections = 1 if joint else len(gradients)
        return _empty(out, (selections, 2), torch.float64), _empty(out, (len(gradients),), torch.bool)

    @fake("hvd_sparse::filter_bucket")
    def _(gradients, residuals, *arguments):
        count, like, members = torch.library.get_ctx().new_dynamic_size(), gradients[0], len(gradients)
        info, finite = _empty(like, (members, 3), torch.float64), _empty(like, (members,), torch.bool)
        return _empty(like, (count,), torch.uint8), info, finite

    @fake("hvd_sparse::accumulate_partition")
    def _(gradients, *arguments):
        count, like = torch.library.get_ctx().new_dynamic_size(), gradients[0]
        sketch = torch.empty(1 + SKETCH_BINS, dtype=torch.float32, device="cpu")
        threshold = torch.empty((), dtype=torch.float64, device="cpu")
        return _empty(like, (count,), torch.int64), sketch, threshold, _empty(like, (len(gradients),), torch.bool)

    @fake("hvd_sparse::fit_thresholds")
    def _(residuals, *arguments):
        return torch.empty((len(residuals), 2), dtype=torch.float64, device="cpu")

    @fake("hvd_sparse::reduce_located_bucket")
    def _(gathered, *arguments):
        return None

    @fake("hvd_sparse::clear_bucket")
    def _(message, *arguments):
        return None

    @fake("hvd_sparse::reduce_bucket")
    def _(gathered, *arguments):
        return None


def _register_cuda_fakes() -> None:
    """Register the fakes of the operators that are there for CUDA devices only."""
    fake = torch.library.register_fake

    @fake("hvd_sparse::take_decode_status")
    def _(like):
        return _empty(like, (2,), torch.int64)
