"""What a pipeline refuses, with an error on all stages; and what stages may do with their inputs."""

import contextlib
import re
import time
import warnings

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hvd_sparse.torch.model_parallel import Pipeline, PipelineError, ThresholdBoundary

pytestmark = pytest.mark.each_value

WORLD = MPI.COMM_WORLD
RANK, STAGES = WORLD.Get_rank(), WORLD.Get_size()
LAST = RANK == STAGES - 1
several = pytest.mark.skipif(STAGES == 1, reason="one stage sends nothing")
ZEROS = torch.zeros(4, 3)


def pipeline(stage=None, **options):
    """Return a pipeline of linear layers."""
    options = {"loss": torch.nn.functional.mse_loss, "timeout": 30.0, **options}
    return Pipeline(torch.nn.Linear(3, 3) if stage is None else stage, **options)


@pytest.mark.parametrize(("own", "reduction"), [("sum", "mean"), ("mean", "sum"), ("batchmean", "sum")])
def test_a_loss_object_of_another_reduction_is_refused(own, reduction):
    loss = torch.nn.KLDivLoss(reduction=own)
    expected = rf"reduction must be that of the loss, got '{reduction}' with KLDivLoss\(reduction='{own}'\)"
    with pytest.raises((ValueError, PipelineError), match=expected):
        pipeline(loss=loss if LAST else None, reduction=reduction)


def test_a_loss_object_that_sums_trains_as_the_unsplit_network():
    torch.manual_seed(RANK)
    stage, inputs, targets = torch.nn.Linear(3, 3), torch.arange(21.0).reshape(7, 3) / 21, torch.arange(7) % 3
    states = WORLD.allgather(stage.state_dict())
    whole = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in states])
    for layer, state in zip(whole, states, strict=True):
        layer.load_state_dict(state)
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    with pipeline(stage, loss=loss, reduction="sum", micro_batches=3) as one:
        one.step(inputs, targets)
    loss(whole(inputs), targets).backward()
    torch.testing.assert_close(stage.weight.grad, whole[RANK].weight.grad)


def test_a_closed_pipeline_says_so():
    one = pipeline()
    one.close()
    for call in (lambda: one.step(ZEROS, ZEROS), lambda: one.evaluate(ZEROS, ZEROS), lambda: one.predict(ZEROS)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@several
def test_a_stage_may_begin_with_an_in_place_operation():
    """As in one process: the gradient of relu(x W0) W1 by its formula, with ones as the loss's gradient."""
    first, last = np.array([[1.0, -2.0], [3.0, 0.5]]), np.array([[2.0], [-1.0]])
    layer = torch.nn.Linear(2, 1 if LAST else 2, bias=False).double()
    weights = first if RANK == 0 else last if LAST else np.eye(2)
    layer.weight.data = torch.from_numpy(weights.T.copy())
    stage = layer if RANK == 0 else torch.nn.Sequential(torch.nn.ReLU(inplace=True), layer)
    inputs = np.array([[1.0, 2.0], [-1.0, 1.0], [0.5, -3.0]])
    with pipeline(stage, loss=lambda outputs, _: outputs.sum(), reduction="sum", micro_batches=2) as one:
        one.step(torch.from_numpy(inputs), torch.zeros(3))
    hidden = inputs @ first
    expected = inputs.T @ ((hidden > 0) * last.T)
    if RANK == 0:
        np.testing.assert_allclose(layer.weight.grad.numpy().T, expected)
    if LAST:
        np.testing.assert_allclose(layer.weight.grad.numpy().T, np.maximum(hidden, 0).sum(0)[:, None])


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_inputs_may_want_a_gradient(micro_batches):
    """They are no leaf where they are parts of a tensor."""
    inputs = torch.ones(4, 3, requires_grad=True)
    with warnings.catch_warnings(), pipeline(torch.nn.Linear(3, 3), micro_batches=micro_batches) as one:
        warnings.simplefilter("error")
        one.step(inputs, ZEROS)
    assert one.stage.weight.grad.any()


@several
@pytest.mark.parametrize("own", ["none", [1.0, 2.0], torch.zeros(7, 3)], ids=["text", "list", "more samples"])
def test_the_last_stage_ignores_its_targets_if_the_first_has_some(own):
    with pipeline(torch.nn.Identity()) as one:
        assert one.evaluate(ZEROS, own if LAST else ZEROS + 2.0) == 4.0


@several
def test_a_boundary_of_density_1_counts_what_it_keeps():
    with pipeline(boundary=1.0) as one:
        one.step(ZEROS, ZEROS)
        found = one.stats()
    assert found["occupancy"] == 1.0
    if not LAST:
        assert found["boundaries"]["output"]["occupancy"] == found["boundaries"]["output"]["mean_occupancy"] == 1.0


@several
def test_a_boundary_for_all_is_not_used_up_by_an_output_of_integers():
    class Two(torch.nn.Module):
        def forward(self, x, y=None):
            return x if LAST else ((x > 0).long(), torch.ones(4, 3)) if y is None else (x, y)

    boundary = ThresholdBoundary(0.25, "laplace")
    with Pipeline(Two(), boundary=boundary, loss=lambda outputs, _: 1.0 * outputs.sum(), timeout=30.0) as one:
        one.evaluate(ZEROS, ZEROS)
        assert [*one.boundaries.items()] == ([] if LAST else [("1", boundary)])


@pytest.mark.parametrize(
    ("inputs", "targets", "error"),
    [
        (np.zeros((4, 3), np.float32), ZEROS, "inputs must be tensors of PyTorch, .*; got ndarray"),
        (ZEROS, np.zeros((4, 3), np.float32), "targets must be tensors of PyTorch, .*; got ndarray"),
        ([1.0, 2.0], ZEROS, "inputs must be tensors of PyTorch, .*; got float"),
        (torch.tensor(1.0), ZEROS, "inputs must have a first dimension that counts samples"),
        (ZEROS, torch.tensor(1.0), "targets must have a first dimension that counts samples"),
    ],
)
@pytest.mark.parametrize("where", [0, STAGES - 1])
def test_data_that_are_no_tensors_of_samples_are_refused(inputs, targets, error, where):
    with pytest.raises((TypeError, ValueError, PipelineError), match=error):
        pipeline().step(inputs, targets if where == RANK else None)


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (lambda outputs, _: float(outputs.sum()), "loss must return a tensor of PyTorch, got float"),
        (lambda outputs, _: outputs, r"loss must return a scalar, got shape \[4, 3\]"),
    ],
)
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_loss_that_is_no_scalar_tensor_is_refused(loss, error, method):
    with pytest.raises((TypeError, ValueError, PipelineError), match=error):
        getattr(pipeline(loss=loss), method)(ZEROS, ZEROS)


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.inference_mode])
def test_a_step_without_anything_to_train_says_so(context):
    stage = torch.nn.Linear(3, 3).requires_grad_(context is torch.inference_mode)
    with pytest.raises((RuntimeError, PipelineError), match="no parameter that requires gradients"), context():
        pipeline(stage).step(ZEROS, ZEROS)


@pytest.mark.parametrize("part", ["conjugate", "its imaginary part"])
def test_lazy_views_of_complex_outputs_are_sent(part):
    """PyTorch conjugates and negates when it reads; the bytes of such a view are those before."""

    class Phases(torch.nn.Linear):
        def forward(self, inputs):
            real = torch.view_as_real(inputs.resolve_conj()).sum(2) if inputs.is_complex() else inputs
            own = super().forward(real)
            view = torch.complex(own, own).conj()
            return own if LAST else view if part == "conjugate" else view.imag

    torch.manual_seed(0)
    stage = Phases(3, 3)
    with pipeline(stage, boundary=1.0) as one:
        loss = one.step(torch.ones(4, 3), ZEROS)
    layer = torch.nn.Linear(3, 3)
    layer.load_state_dict(stage.state_dict())
    found = torch.ones(4, 3)
    for number in range(STAGES):
        found = layer(found)
        if number < STAGES - 1:
            found = torch.zeros_like(found) if part == "conjugate" else -found
    torch.testing.assert_close(torch.tensor(loss), found.square().mean().detach())


@several
def test_sparse_outputs_are_refused():
    class Sparse(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).relu().to_sparse()

    with pytest.raises((TypeError, PipelineError), match=r"a dense tensor, got one of layout torch\.sparse_coo"):
        pipeline(Sparse(3, 3)).step(ZEROS, ZEROS)


@several
def test_a_type_that_messages_cannot_have_is_refused():
    class Tiny(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).to(torch.float8_e4m3fn)

    with pytest.raises((TypeError, PipelineError), match="output 'output' of a stage must have one of the dtypes"):
        pipeline(Tiny(3, 3)).predict(ZEROS)


class Pair(torch.nn.Module):
    """The last stage returns a second output, whose first dimension does not count samples."""

    def __init__(self, second):
        super().__init__()
        self.second = second

    def forward(self, x):
        return (x, self.second(x)) if LAST else x


@pytest.mark.parametrize(("second", "shape"), [(torch.sum, []), (torch.t, [3, 2])], ids=["scalar", "transposed"])
def test_predictions_join_only_what_counts_samples(second, shape):
    inputs = torch.arange(12.0).reshape(4, 3)
    with pipeline(Pair(second)) as one:
        found = one.predict(inputs)
    if LAST:
        assert torch.equal(found[0], inputs) and torch.equal(found[1], second(inputs))
    with pytest.raises((ValueError, PipelineError), match=re.escape(f"output '1' has shape {shape} for 2 samples")):
        with pipeline(Pair(second), micro_batches=2) as one:
            one.predict(inputs)
            one.evaluate(inputs, inputs)  # stages but the last may only be told now


@several
def test_predictions_run_ahead_by_one_batch_at_most():
    """By the clock of the host: a stage begins a batch after the last one has ended that before the previous."""
    times = []

    class Timed(torch.nn.Identity):
        def forward(self, x):
            begin = time.monotonic()
            time.sleep(0.03 if LAST else 0.0)
            times.append((begin, time.monotonic()))
            return x

    with pipeline(Timed()) as one:
        for number in range(8):
            one.predict(ZEROS)
            if number == 3:
                one.evaluate(ZEROS, ZEROS)
        assert one.evaluate(ZEROS, ZEROS + 1.0) == 1.0
    ends = WORLD.bcast([end for _, end in times], STAGES - 1)
    assert len(times) == 10
    assert all(begin >= end for (begin, _), end in zip(times[2:], ends, strict=False))


@several
def test_a_boundary_that_is_first_used_in_inference_mode_trains():
    with pipeline(boundary=0.5) as one:
        with torch.inference_mode():
            one.evaluate(torch.ones(4, 3), torch.ones(4, 3))
        one.step(torch.ones(4, 3), torch.ones(4, 3))
        told = one.stats()["boundaries"]
    assert [boundary["batches"] for boundary in told.values()] == ([] if LAST else [1])
