"""If stages differ, or fail outside of a step, every stage raises an error with the reason."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hvd_sparse.torch.model_parallel import Pipeline, PipelineError

RANK, STAGES = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
several = pytest.mark.skipif(STAGES == 1, reason="one stage agrees with itself")


def pipeline(**options):
    """Return a pipeline of linear layers."""
    options = {"loss": torch.nn.functional.mse_loss, "timeout": 30.0, **options}
    return Pipeline(torch.nn.Linear(3, 3), **options)


@several
@pytest.mark.parametrize(("name", "values"), [("micro_batches", (2, 4)), ("schedule", ("gpipe", "1f1b"))])
def test_settings_that_differ_are_refused_on_all_stages(name, values):
    value = values[RANK == STAGES - 1]
    first, other = values
    expected = f"{name} must be the same on all ranks, got {first!r} on stage 0 and {other!r} on stage {STAGES - 1}"
    with pytest.raises(ValueError, match=expected):
        pipeline(**{name: value})


def test_as_many_micro_batches_as_a_message_can_number():
    with pytest.raises(ValueError, match="micro_batches must be an integer from 1 to 65535, got 65536"):
        pipeline(micro_batches=65536)


def test_micro_batches_of_numpy_are_those_of_python():
    pipeline(micro_batches=np.int64(2) if RANK == 0 else 2).close()


def test_a_rank_that_split_left_out_is_refused():
    with pytest.raises(ValueError, match=r"communicator must be .* got COMM_NULL"):
        pipeline(communicator=MPI.COMM_NULL)


@several
def test_a_stage_that_raises_between_steps_is_the_reason_of_all_that_follows():
    data = (torch.ones(4, 3), torch.zeros(4, 3))
    failing = STAGES - 1
    with pytest.raises(ArithmeticError if failing == RANK else PipelineError, match="out of luck"), pipeline() as one:
        one.step(*data)
        if failing == RANK:
            raise ArithmeticError("out of luck")
        one.step(*data)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (SystemExit(), ""),
        (SystemExit(0), ""),
        (GeneratorExit(), ""),  # the end of a generator that has a pipeline
        (SystemExit(1), "SystemExit: 1"),
        (SystemExit("no data"), "SystemExit: no data"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
    ids=repr,
)
def test_an_orderly_end_is_no_failure(error, failure):
    with pytest.raises(type(error)), pipeline() as one:
        one.step(torch.ones(4, 3), torch.zeros(4, 3))
        MPI.COMM_WORLD.Barrier()  # else a stage may hear of another one's failure in its step
        raise error
    assert failure in one._channel.failure and bool(failure) == bool(one._channel.failure)


@several
@pytest.mark.parametrize("others", ["predict", "evaluate"])
def test_stages_that_make_different_calls_are_told(others):
    """A prediction's messages would else pass for those of an evaluation, with a loss of 0."""
    calls = {"predict": (torch.ones(4, 3),), "evaluate": (torch.ones(4, 3), torch.zeros(4, 3))}
    own = others if RANK > 0 else {"predict": "evaluate", "evaluate": "predict"}[others]
    with pytest.raises(
        (ValueError, PipelineError), match="every stage must call step, evaluate and predict in the same"
    ):
        with pipeline() as one:
            getattr(one, own)(*calls[own])
            one.evaluate(*calls["evaluate"])  # a stage that predicts runs ahead by a batch


@several
def test_an_error_that_follows_from_another_stages_is_replaced_by_its_reason():
    with pytest.raises(ArithmeticError if RANK == 0 else PipelineError, match="out of luck"), pipeline():
        if RANK == 0:
            raise ArithmeticError("out of luck")
        MPI.COMM_WORLD.recv(source=0)  # as in Horovod: it ends when stage 0 has told the others
        raise ConnectionError("somebody else has gone")
    if RANK == 0:
        for rank in range(1, STAGES):
            MPI.COMM_WORLD.send(None, rank)
