"""Pipelines with one stage per rank equal the same training in one process."""

import copy
import time

import numpy as np
import pytest
import torch
from mpi4py import MPI
from pipeline_oracle import Oracle, OracleMask, make_stages

from hvd_sparse import mailbox
from hvd_sparse.torch.model_parallel import Pipeline, PipelineError, ThresholdBoundary
from hvd_sparse.wire import payload_size

pytestmark = pytest.mark.each_value

WORLD = MPI.COMM_WORLD
RANK, STAGES = WORLD.Get_rank(), WORLD.Get_size()
LAST = RANK == STAGES - 1
SIZES = [*[13, 37, 101, 23, 6][:STAGES], 5]
several = pytest.mark.skipif(STAGES == 1, reason="one stage has no boundary")


def batches(count, rows=(7, 1, 12), seed=0):
    """Return inputs and targets of batches whose sizes take turns."""
    random = np.random.default_rng(seed)
    for number in range(count):
        size = rows[number % len(rows)]
        yield random.normal(size=(size, SIZES[0])).astype(np.float32), random.integers(0, 5, size)


def pair(density=1.0, threshold="topk", micro_batches=3, schedule="gpipe", **options):
    """Return this rank's pipeline and optimizer, and the oracle."""
    loss, lr = torch.nn.functional.cross_entropy, 0.1
    stages = make_stages(SIZES)
    masks = [OracleMask(density, threshold) for _ in stages[1:]]
    oracle = Oracle(copy.deepcopy(stages), masks, loss, micro_batches, lr)
    options = {"boundary": ThresholdBoundary(density, threshold), "loss": loss, **options}
    pipeline = Pipeline(stages[RANK], micro_batches=micro_batches, schedule=schedule, timeout=60.0, **options)
    return pipeline, torch.optim.SGD(stages[RANK].parameters(), lr=lr, momentum=0.9), oracle


def assert_same_parameters(pipeline, oracle):
    theirs = oracle.network[2 * RANK].state_dict()
    for name, tensor in pipeline.stage.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.rank_counts
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("density", "threshold"), [(1.0, "topk"), (0.1, "topk"), (0.1, "laplace"), (1.0, "laplace")])
def test_training_is_that_of_one_process_bit_for_bit(schedule, micro_batches, density, threshold):
    pipeline, optimizer, oracle = pair(density, threshold, micro_batches, schedule)
    with pipeline:
        for inputs, targets in batches(50):
            optimizer.zero_grad()
            loss = pipeline.step(torch.from_numpy(inputs), torch.from_numpy(targets))
            optimizer.step()
            assert loss == pytest.approx(oracle.step(inputs, targets), rel=0, abs=1e-12)
        assert_same_parameters(pipeline, oracle)
        inputs, targets = next(batches(1, seed=9))
        expected, outputs = oracle.evaluate(inputs, targets)
        assert pipeline.evaluate(torch.from_numpy(inputs), torch.from_numpy(targets)) == pytest.approx(
            expected, rel=1e-6
        )
        found = pipeline.predict(torch.from_numpy(inputs))
        assert torch.allclose(found, outputs, atol=1e-6) if LAST else found is None  # there in one batch, not in parts


@pytest.mark.parametrize("limit", [64, 1000])
def test_messages_longer_than_mpi_can_count(monkeypatch, limit):
    """With the limit lowered to less than a header, and to a part of a message."""
    monkeypatch.setattr(mailbox, "MOST_BYTES", limit)
    pipeline, optimizer, oracle = pair(0.5)
    with pipeline:
        for inputs, targets in batches(6):
            optimizer.zero_grad()
            loss = pipeline.step(torch.from_numpy(inputs), torch.from_numpy(targets))
            optimizer.step()
            assert loss == pytest.approx(oracle.step(inputs, targets), rel=0, abs=1e-12)
        assert_same_parameters(pipeline, oracle)


@several
@pytest.mark.parametrize("threshold", ["topk", "laplace"])
def test_statistics_tell_bytes_and_occupancy(threshold):
    pipeline, _, _ = pair(0.1, threshold, micro_batches=1)
    with pipeline:
        for inputs, targets in batches(6, rows=(64,)):
            pipeline.step(torch.from_numpy(inputs), torch.from_numpy(targets))
        pipeline.evaluate(torch.from_numpy(inputs), torch.from_numpy(targets))
        stats = pipeline.stats()
    assert stats["steps"] == 6
    forward, backward = stats["forward"], stats["backward"]
    assert forward["messages"] == (0 if LAST else 6) and backward["messages"] == (0 if RANK == 0 else 6)
    if not LAST:
        f = SIZES[RANK + 1]
        assert forward["dense_bytes"] == 6 * 64 * f * 4
        if threshold == "topk":
            k = int(0.1 * f + 0.5)
            assert stats["occupancy"] == k / f == stats["boundaries"]["output"]["occupancy"]
            headers = forward["sent_bytes"] - 6 * payload_size(64 * f, 64 * k, "auto", "float32")
            assert 0 < headers < 6 * 100
        assert stats["boundaries"]["output"]["batches"] == 6
    if RANK > 0 and threshold == "topk":
        f = SIZES[RANK]
        k = int(0.1 * f + 0.5)
        assert backward["sent_bytes"] == 6 * (32 + payload_size(64 * k, 64 * k, "dense", "float32"))
    assert (stats["targets_bytes"] > 0) == (RANK == 0)


@several
@pytest.mark.parametrize("rows", [32, 256])
def test_at_95_percent_a_wide_boundary_moves_15_times_less_forward_and_19_times_backward(rows):
    stage = torch.nn.Linear(8 if RANK == 0 else 512, 3 if LAST else 512)
    pipeline = Pipeline(stage, boundary=0.05, loss=torch.nn.functional.cross_entropy, timeout=60.0)
    with pipeline:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            pipeline.step(torch.randn(rows, 8, generator=generator), torch.arange(rows) % 3)
        stats = pipeline.stats()
    assert LAST or stats["forward"]["ratio"] >= 15.0
    assert RANK == 0 or stats["backward"]["ratio"] >= 19.0


class Several(torch.nn.Module):
    """Takes and returns several tensors: a matrix, a vector, and integers."""

    def __init__(self, first, last):
        super().__init__()
        torch.manual_seed(3 + RANK)
        self.linear, self.first, self.last = torch.nn.Linear(9, 9), first, last

    def forward(self, x, scale=None, ids=None):
        if self.first:
            scale, ids = x.mean(dim=1), (x[:, 0] > 0).long()
        y = self.linear(x) * scale[:, None] + ids[:, None]
        return y if self.last else {"x": y, "scale": scale * 2.0, "ids": ids}


@several
@pytest.mark.parametrize("boundary", [None, {"x": 0.3}, {"x": ThresholdBoundary(1.0), "scale": None}])
def test_several_tensors_cross_a_boundary(boundary):
    stage = Several(RANK == 0, LAST)
    pipeline = Pipeline(stage, boundary=boundary, loss=torch.nn.functional.mse_loss, timeout=60.0)
    x = torch.randn(8, 9, generator=torch.Generator().manual_seed(1))
    with pipeline:
        first = pipeline.step(x, torch.zeros(8, 9))
        assert torch.isfinite(torch.tensor(first)) and stage.linear.weight.grad.abs().sum() > 0
    whole = []
    for rank in range(STAGES):
        state = WORLD.bcast(stage.state_dict() if rank == RANK else None, rank)
        whole.append(Several(rank == 0, rank == STAGES - 1))
        whole[-1].load_state_dict(state)
    given, mask = (x,), OracleMask(0.3 if boundary == {"x": 0.3} else 1.0)
    for module in whole[:-1]:
        out = module(*given)
        given = (mask(out["x"]), out["scale"], out["ids"])
    loss = torch.nn.functional.mse_loss(whole[-1](*given), torch.zeros(8, 9))
    loss.backward()
    assert first == loss.item()
    assert torch.equal(stage.linear.weight.grad, whole[RANK].linear.weight.grad)


@several
@pytest.mark.parametrize("boundary", [{0: 0.5}, {"values": 0.5}, 0.5])
def test_any_name_is_a_name_of_an_output(boundary):
    """Numbers count the outputs of a tuple; the names of a dictionary's methods are no exception."""

    class Named(torch.nn.Linear):
        def forward(self, x=None, values=None):
            y = super().forward(x if values is None else values)
            return y if LAST else (y,) if 0 in names else {"values": y}

    names = boundary if isinstance(boundary, dict) else {}
    pipeline = Pipeline(Named(8, 8), boundary=None if LAST else boundary, loss=lambda y, _: y.sum(), timeout=60.0)
    with pipeline:
        pipeline.step(torch.randn(4, 8), torch.zeros(4))
    expected = [] if LAST else ["0" if 0 in names else "values"]
    assert list(pipeline.stats()["boundaries"]) == expected


@several
@pytest.mark.parametrize("where", [0, STAGES - 1])
def test_a_wrong_argument_of_one_stage_is_told_to_all(where):
    """Also where the error is of a type that nobody thought of."""

    class Odd(ThresholdBoundary):
        def to(self, *args, **kwargs):
            raise KeyError("an odd error")

    boundary = Odd(0.5) if RANK == where else 0.5
    with pytest.raises(KeyError if RANK == where else PipelineError, match="an odd error"):
        Pipeline(torch.nn.Linear(8, 8), boundary=boundary, loss=torch.nn.functional.mse_loss, timeout=20.0)


class Scaled(torch.nn.Module):
    """Returns its input, and a hundred times its input; keeps what it gets."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept = torch.nn.Parameter(torch.ones(())), {}

    def forward(self, a, b=None):
        self.kept = {"a": a, "b": b}
        outputs = {"a": a * self.weight, "b": 100 * a}
        return outputs["a"].sum() if LAST else outputs


@several
def test_outputs_that_share_a_boundary_have_thresholds_of_their_own_that_are_restored():
    def make():
        boundary = ThresholdBoundary(0.1, "laplace")
        return Pipeline(Scaled(), boundary=boundary, loss=lambda outputs, _: outputs, timeout=60.0)

    x = torch.randn(64, 200, generator=torch.Generator().manual_seed(0))
    kept, saved = [], None
    for _ in range(2):
        with make() as pipeline:
            if saved is None:
                for _ in range(5):
                    pipeline.step(x, torch.zeros(64))
                saved = pipeline.boundaries.state_dict()
            else:
                pipeline.boundaries.load_state_dict(saved)
            pipeline.evaluate(x, torch.zeros(64))
            if RANK > 0:
                kept.append([int((one != 0).sum()) for one in pipeline.stage.kept.values()])
    if RANK == 1:
        assert kept[0] == kept[1] and kept[0][0] == kept[0][1] > 0  # b is a multiple of a
    assert LAST or saved["b.running_threshold"] == pytest.approx(100 * saved["a.running_threshold"].item(), rel=1e-5)


@several
def test_a_slow_stage_gets_what_was_sent_before_the_end(monkeypatch):
    """The first stage ends long before the last one takes its messages, and waits for that: none is given up."""
    sent, close = [], mailbox.Mailbox.close
    monkeypatch.setattr(mailbox.Mailbox, "close", lambda box, timeout: (sent.append(box.reap()), close(box, timeout)))

    class Slow(torch.nn.Identity):
        def forward(self, x):
            time.sleep(0.3 if LAST else 0.0)
            return x

    with Pipeline(Slow(), loss=lambda outputs, _: outputs.mean(), timeout=60.0) as pipeline:
        found = [pipeline.predict(torch.full((512, 1024), float(number))) for number in range(4)]
    assert sent and all(sent)
    assert not LAST or [one[0, 0].item() for one in found] == [0.0, 1.0, 2.0, 3.0]


@several
def test_half_precision_crosses_as_it_is():
    pipeline, optimizer, oracle = pair(0.2, micro_batches=2)
    with pipeline:
        for inputs, targets in batches(3, rows=(32,)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = pipeline.step(torch.from_numpy(inputs), torch.from_numpy(targets))
                expected = oracle.step(inputs, targets)
            optimizer.step()
            assert loss == pytest.approx(expected, rel=0, abs=1e-12)
        assert_same_parameters(pipeline, oracle)
        if not LAST:
            assert pipeline.stats()["forward"]["dense_bytes"] == 3 * 32 * SIZES[RANK + 1] * 2


def test_targets_may_be_on_the_last_stage_and_a_loss_may_be_a_sum():
    def loss(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")

    pipeline, _, oracle = pair(0.5, loss=loss, reduction="sum", micro_batches=2)
    inputs, targets = next(batches(1))
    with pipeline:
        found = pipeline.step(
            torch.from_numpy(inputs) if RANK == 0 else None, torch.from_numpy(targets) if LAST else None
        )
        assert pipeline.stats()["targets_bytes"] == 0
    assert found / len(inputs) == pytest.approx(oracle.step(inputs, targets), rel=1e-6)


@several
@pytest.mark.parametrize("where", [0, STAGES - 1])
def test_what_is_not_a_number_stays_visible(where):
    pipeline, _, _ = pair(0.05)
    inputs, targets = next(batches(1))
    if where == 0:
        inputs[3, 2] = np.nan
    elif LAST:
        with torch.no_grad():
            pipeline.stage[0].weight[0, 0] = np.inf
    with pipeline:
        loss = pipeline.step(torch.from_numpy(inputs), torch.from_numpy(targets))
    assert np.isnan(loss)


@pytest.mark.parametrize("failing", range(STAGES))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_stage_that_raises_ends_all_with_the_reason(failing, direction):
    pipeline, _, _ = pair(0.5, micro_batches=2)

    def fail(*_):
        raise ArithmeticError("a division that has gone wrong")

    if failing == RANK:
        if direction == "forward":
            pipeline.stage.register_forward_hook(fail)
        else:
            pipeline.stage[0].weight.register_hook(fail)
    inputs, targets = (torch.from_numpy(array) for array in next(batches(1)))
    expected = ArithmeticError if failing == RANK else PipelineError
    with pipeline, pytest.raises(expected, match="a division that has gone wrong"):
        for _ in range(2):  # stages whose part in a step is over hear of it in the next one
            pipeline.step(inputs, targets)
    with pytest.raises(RuntimeError, match="cannot go on"):
        pipeline.step(inputs, targets)


@several
def test_a_shape_that_differs_ends_all_with_the_reason():
    stages = make_stages(SIZES)
    stage = stages[RANK]
    if RANK == 1:
        stage = torch.nn.Linear(SIZES[1] + 1, SIZES[2])
    pipeline = Pipeline(stage, boundary=0.5, loss=torch.nn.functional.cross_entropy, timeout=60.0)
    inputs, targets = (torch.from_numpy(array) for array in next(batches(1)))
    with pipeline, pytest.raises(RuntimeError if RANK == 1 else PipelineError, match="shapes"):
        pipeline.step(inputs, targets)


@several
def test_a_stage_that_ends_early_ends_the_others():
    pipeline, _, _ = pair()
    inputs, targets = (torch.from_numpy(array) for array in next(batches(1)))
    pipeline.step(inputs, targets)
    if RANK == 0:
        pipeline.close()
    else:
        with pytest.raises(PipelineError, match=r"stage 0 has ended|stage 1 has failed"):
            pipeline.step(inputs, targets)
    WORLD.Barrier()


@several
def test_stages_must_do_the_same():
    pipeline, _, _ = pair()
    inputs, targets = (torch.from_numpy(array) for array in next(batches(1)))
    with pytest.raises((ValueError, PipelineError), match="the same order"):
        (pipeline.step if RANK == 0 else pipeline.evaluate)(inputs, targets)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"schedule": "zigzag"}, "schedule must be one of 'gpipe', '1f1b'; got 'zigzag'"),
        ({"micro_batches": 0}, "micro_batches must be an integer from 1 to 65535, got 0"),
        ({"micro_batches": 2.0}, "micro_batches must be an integer from 1 to 65535, got 2.0 of type float"),
        ({"timeout": 0}, "timeout must be above 0 and finite, in seconds, got 0"),
        ({"timeout": "60"}, "timeout must be a number above 0 and finite, in seconds, got '60' of type str"),
        ({"reduction": "max"}, "reduction must be one of"),
        ({"boundary": 1.5}, "density must be in"),
        ({"boundary": {"output": "many"}}, "density must be a number"),
    ],
)
def test_a_wrong_argument_on_one_stage_is_refused_on_all(options, error):
    good = {"loss": torch.nn.functional.mse_loss, "timeout": 60.0}
    wrong = options if RANK == STAGES // 2 else {}
    with pytest.raises((ValueError, TypeError, PipelineError), match=error):
        Pipeline(torch.nn.Linear(3, 3), **{**good, **wrong})


def test_the_last_stage_needs_a_loss():
    with pytest.raises((TypeError, PipelineError), match="loss must be a function"):
        Pipeline(torch.nn.Linear(3, 3), timeout=60.0)


@pytest.mark.parametrize(
    ("inputs", "targets", "error"),
    [
        (None, torch.zeros(4, 3), "inputs must be given on the first stage"),
        (torch.zeros(0, 3), torch.zeros(0, 3), "at least 1"),
        ((torch.zeros(4, 3), torch.zeros(5, 3)), torch.zeros(4, 3), "the same number of samples"),
        (torch.zeros(4, 3), torch.zeros(3, 3), "targets must have as many samples as inputs, 4; got 3"),
        (torch.zeros(4, 3), None, "targets must be given"),
    ],
)
def test_wrong_data_is_refused_on_all_stages(inputs, targets, error):
    pipeline = Pipeline(torch.nn.Linear(3, 3), loss=torch.nn.functional.mse_loss, timeout=60.0)
    with pytest.raises((ValueError, PipelineError), match=error):
        pipeline.step(inputs, targets if RANK == 0 else None)


@several
def test_a_boundary_for_an_output_that_is_none_is_refused():
    boundary = {"hidden": 0.5} if RANK == 0 else None
    pipeline = Pipeline(torch.nn.Linear(3, 3), boundary=boundary, loss=torch.nn.functional.mse_loss, timeout=60.0)
    with pytest.raises((ValueError, PipelineError), match=r"must name outputs of this stage, \['output'\]"):
        pipeline.step(torch.zeros(4, 3), torch.zeros(4, 3))
