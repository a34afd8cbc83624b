"""Reduce-scatter: equals its NumPy transcription, nothing is lost, received bytes do not grow with the world size."""

import functools

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import SCOPES, SHAPES, draw, shuffled, whole_numbers
from helpers import assert_ranks_agree, backward, distributed, drive, make_parameters, memory_of, step
from oracle import STEPS, Method
from test_conservation import Ledger, Wave
from test_oracle import Trial, run

from hvd_sparse import wire
from hvd_sparse.torch import Compression

pytestmark = [pytest.mark.rank_counts, pytest.mark.each_value]

SCATTER = {"exchange": "reduce_scatter", "dense_fallback": None}
COMPLETE = pytest.mark.parametrize("complete", [False, True], ids=["", "complete"])
METHODS = ["gradient_dropping", "topk", "dgc", "samomentum"]


@COMPLETE
@pytest.mark.parametrize("scope", SCOPES)
def test_every_method_is_its_transcription(scope, complete):
    """Regions are agreed on in steps 0 and 64."""
    steps = max(STEPS, 70)
    trials = []
    variants = {
        "gradient_dropping": {},
        "topk": {},
        "dgc": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05, "clip_norm": 8.0},
        "unmasked": {"momentum": 0.8, "factor_masking": False},
        "samomentum": {"momentum": 0.7},
    }
    for title, variant in variants.items():
        settings = {"density": 0.05, "scope": scope, "min_numel": 100, "complete": complete, **variant}
        make = functools.partial(getattr(Compression, title if title != "unmasked" else "dgc"), **settings, **SCATTER)
        method = Method(owned=True, samomentum=title == "samomentum", **settings)
        trials.append(Trial(title, method, make, steps))
    run(trials, steps)


@pytest.mark.parametrize("coding", ["run_length", "elias_fano", "bitmap", "auto"])
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16", "int2", "int1"])
@pytest.mark.parametrize("scope", SCOPES)
@COMPLETE
def test_nothing_is_lost(complete, scope, values, coding):
    """What rounding keeps back returns to a residual, at the rank that selected it or at the owner of its region."""
    parameters = make_parameters()
    settings = {"values": values, "coding": coding, "scope": scope, "granularity": "channel", **SCATTER}
    settings["complete"] = complete
    compressor = Compression.gradient_dropping(parameters.items(), density=0.02, min_numel=100, **settings)
    ledger = Ledger(parameters)
    for t in range(25):
        gradients = whole_numbers(SHAPES, t, hvd.rank(), most=9999)
        ledger.feed(gradients)
        reduced = drive(compressor, parameters, gradients, order=shuffled(gradients, t, hvd.rank()))
        assert_ranks_agree(reduced)
        ledger.receive(reduced)
    tolerance = 1.0 if values in ("int2", "int1") else 0.0  # means of whole numbers are none
    assert ledger.check(compressor, tolerance) > 0.0


@COMPLETE
@pytest.mark.parametrize("method", METHODS)
def test_at_density_one_it_is_horovod(method, complete):
    parameters = make_parameters()
    settings = {"complete": complete, **({"momentum": 0.0} if method in ("dgc", "samomentum") else {})}
    compressor = getattr(Compression, method)(parameters.items(), density=1.0, min_numel=0, **settings, **SCATTER)
    for t in range(3):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        reduced = drive(compressor, parameters, gradients)
        for name in SHAPES:
            expected = sum(whole_numbers(SHAPES, t, rank)[name] for rank in range(hvd.size()))
            np.testing.assert_array_equal(reduced[name].numpy(), expected.astype(np.float32))


def test_all_that_was_selected_is_kept_where_there_is_room():
    """All ranks select the same elements: the sums are those of a gather, bit for bit."""
    results = []
    for exchange in ("gather", "reduce_scatter"):
        parameters = make_parameters()
        compressor = Compression.gradient_dropping(
            parameters.items(), density=0.1, min_numel=100, exchange=exchange, dense_fallback=None
        )
        gradients = draw(SHAPES, 0, 0)
        scaled = {name: value * (1 + hvd.rank() / 8) for name, value in gradients.items()}
        results.append([drive(compressor, parameters, scaled) for _ in range(2)])
    for gathered, scattered in zip(*results, strict=True):
        changed = {name: scattered[name] != 0 for name in SHAPES}
        for name in SHAPES:
            assert torch.equal(scattered[name][changed[name]], gathered[name][changed[name]])
        sparse = [name for name in SHAPES if np.prod(SHAPES[name]) >= 100]
        kept = sum(int(changed[name].sum()) for name in sparse)
        assert 0.8 * 110 <= kept <= 110 + hvd.size()  # regions are cut at whole elements


@COMPLETE
def test_what_a_rank_receives_does_not_grow_with_the_ranks(complete):
    """Entries of 6 bytes at most, twice; to complete, as many float32, which an all-reduce moves twice."""
    if hvd.size() == 1:
        pytest.skip("one rank receives nothing")
    parameters = {"weight": torch.nn.Parameter(torch.zeros(200_000))}
    compressor = Compression.dgc(parameters.items(), density=0.01, complete=complete, **SCATTER)
    for t in range(4):
        drive(compressor, parameters, draw({"weight": (200_000,)}, t, hvd.rank()))
    received = compressor.stats()["step"]["received_bytes"]
    headers, entry = 200 + hvd.size() * 100, 6 + 4 * complete
    assert received <= 2.1 * 2000 * entry * (hvd.size() - 1) / hvd.size() + headers


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 1, 1), (2, 70_000), (65_535, 65_537)])
@pytest.mark.parametrize("density", [1e-6, 0.3])
@COMPLETE
def test_odd_sizes(complete, sizes, density):
    """One element for all ranks, fewer elements than ranks, regions without any."""
    shapes = {f"w{i}": (size,) for i, size in enumerate(sizes)}
    parameters = make_parameters(shapes)
    compressor = Compression.topk(parameters.items(), density, min_numel=0, complete=complete, **SCATTER)
    ledger = Ledger(parameters)
    for t in range(4):
        gradients = whole_numbers(shapes, t, hvd.rank())
        ledger.feed(gradients)
        reduced = drive(compressor, parameters, gradients)
        assert_ranks_agree(reduced)
        ledger.receive(reduced)
    ledger.check(compressor)


@COMPLETE
@pytest.mark.parametrize("scope", SCOPES)
def test_missing_late_and_frozen_gradients(scope, complete):
    """A tensor is missing, returns, or is frozen on one rank: nothing is lost, and no rank waits forever."""
    parameters = make_parameters()
    settings = {"scope": scope, "complete": complete, **SCATTER}
    compressor = Compression.gradient_dropping(parameters.items(), density=0.05, min_numel=100, **settings)
    ledger = Ledger(parameters)
    for t in range(8):
        parameters["head.weight"].requires_grad_(not (t in (4, 5) and hvd.rank() == 0))
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        if t in (2, 6):
            del gradients["body.weight"]
        ledger.feed({name: g for name, g in gradients.items() if parameters[name].requires_grad})
        reduced = drive(compressor, parameters, gradients)
        assert_ranks_agree(reduced)
        ledger.receive(reduced)
    ledger.check(compressor)


@COMPLETE
def test_a_step_that_is_not_finite_is_skipped_and_nothing_is_lost(complete):
    parameters = make_parameters()
    settings = {"min_numel": 100, "complete": complete, **SCATTER}
    compressor = Compression.gradient_dropping(parameters.items(), density=0.05, **settings)
    ledger = Ledger(parameters)
    for t in range(6):
        gradients = {name: np.array(value) for name, value in whole_numbers(SHAPES, t, hvd.rank()).items()}
        if t == 3 and hvd.rank() == hvd.size() - 1:
            gradients["head.weight"][7] = np.nan
        reduced = drive(compressor, parameters, gradients)
        if t == 3:
            gradients["head.weight"] = np.nan_to_num(gradients["head.weight"])
            assert all(torch.isnan(result).all() for result in reduced.values())
            dense = [name for name in SHAPES if np.prod(SHAPES[name]) < 100]
            ledger.feed({name: value for name, value in gradients.items() if name not in dense})
            continue
        ledger.feed(gradients)
        ledger.receive(reduced)
    ledger.check(compressor)


def test_a_schedule_that_is_dense_now_and_then():
    parameters = make_parameters()
    compressor = Compression.gradient_dropping(parameters.items(), density=Wave(), min_numel=100, **SCATTER)
    ledger = Ledger(parameters)
    for t in range(15):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        ledger.feed(gradients)
        ledger.receive(drive(compressor, parameters, gradients))
    ledger.check(compressor)


@pytest.mark.parametrize(("at", "complete"), [(1, False), (5, False), (5, True)])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(at, complete):
    """Regions are state. If one rank lacks them, all ranks agree on new ones."""

    def train(parameters, compression, optimizer, steps):
        for t in steps:
            step(optimizer, parameters, draw(SHAPES, t, hvd.rank()))

    make = functools.partial(Compression.dgc, density=0.05, min_numel=100, complete=complete, **SCATTER)
    parameters = make_parameters()
    compression = make(parameters.items())
    optimizer = distributed(parameters, compression)
    train(parameters, compression, optimizer, range(at))
    saved, weights = compression.state_dict(), {name: p.detach().clone() for name, p in parameters.items()}
    train(parameters, compression, optimizer, range(at, 12))
    others = make_parameters()
    with torch.no_grad():
        for name, parameter in others.items():
            parameter.copy_(weights[name])
    again = make(others.items())
    second = distributed(others, again)
    again.load_state_dict(saved)
    train(others, again, second, range(at, 12))
    assert all(torch.equal(others[name], parameters[name]) for name in SHAPES)
    if hvd.rank() == 0:
        saved["regions"] = []
    again.load_state_dict(saved)
    train(others, again, second, range(at, 14))
    assert_ranks_agree(others)


def test_it_goes_with_the_optimizers_own_options():
    """Sum is the mean times the world size, predivide changes nothing, two passes are twice the gradient of one."""
    if hvd.size() == 1:
        pytest.skip("Horovod calls no compressor in a job of one process")

    def reduced(times=1, passes=1, **options):
        parameters, found = make_parameters(), []
        compression = Compression.gradient_dropping(parameters.items(), density=0.05, min_numel=100, **SCATTER)
        optimizer = distributed(parameters, compression, 1.0, backward_passes_per_step=passes, **options)
        for t in range(3):
            gradients = {name: times * one for name, one in whole_numbers(SHAPES, t, hvd.rank()).items()}
            optimizer.zero_grad()
            for _ in range(passes):
                backward(parameters, gradients)
            optimizer.step()
            found.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
        assert_ranks_agree(parameters)
        return found

    runs = reduced(), reduced(op=hvd.Sum), reduced(gradient_predivide_factor=2.0), reduced(times=2), reduced(passes=2)
    for mean, added, divided, doubled, twice in zip(*runs, strict=True):
        for name in SHAPES:
            torch.testing.assert_close(added[name], hvd.size() * mean[name], rtol=1e-6, atol=1e-5)
            torch.testing.assert_close(divided[name], mean[name], rtol=1e-6, atol=1e-5)
            torch.testing.assert_close(twice[name], doubled[name], rtol=1e-6, atol=1e-5)


def test_process_sets():
    if hvd.size() < 3:
        pytest.skip("a process set that is not all ranks, of two at least, needs three ranks")
    pair = hvd.add_process_set([0, hvd.size() - 1])
    try:
        if pair.included():
            parameters = make_parameters()
            compressor = Compression.gradient_dropping(
                parameters.items(), density=0.05, min_numel=100, process_set=pair, **SCATTER
            )
            ledger = Ledger(parameters, pair)
            for t in range(5):
                gradients = whole_numbers(SHAPES, t, hvd.rank())
                ledger.feed(gradients)
                reduced = drive(compressor, parameters, gradients, op=hvd.Average, process_set=pair)
                assert_ranks_agree(reduced, pair)
                ledger.receive({name: 2 * mean for name, mean in reduced.items()})
            assert ledger.check(compressor) > 0.0
    finally:
        hvd.remove_process_set(pair)


@pytest.mark.parametrize(("favours", "same_as"), [(True, "reduce_scatter"), (False, "gather")])
def test_auto_is_what_the_performance_model_favours(favours, same_as, monkeypatch):
    """It does so on more ranks than tests have, so that it is told here."""
    asked = []

    def decide(numels, *form):
        asked.append(numels)
        return favours and hvd.size() > 1

    monkeypatch.setattr("hvd_sparse.algorithms.top_k.favours_scattered", decide)
    results = []
    for exchange in ("auto", same_as):
        parameters = make_parameters()
        compressor = Compression.dgc(
            parameters.items(), density=0.05, min_numel=100, exchange=exchange, dense_fallback=None
        )
        results.append([drive(compressor, parameters, draw(SHAPES, t, hvd.rank())) for t in range(3)])
    assert set(asked[0]) == {np.prod(shape) for shape in SHAPES.values() if np.prod(shape) >= 100}
    for found, expected in zip(*results, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in SHAPES)


def test_bad_names_are_refused():
    with pytest.raises(
        ValueError, match="exchange must be one of 'gather', 'reduce_scatter', 'hierarchical', 'auto'; got 'ring'"
    ):
        Compression.dgc(make_parameters().items(), exchange="ring")


def test_completing_is_for_a_reduce_scatter():
    parameters = make_parameters()
    for exchange in ({"exchange": "gather"}, {"exchange": "hierarchical", "between_hosts": "gather"}):
        with pytest.raises(ValueError, match='complete=True needs exchange="reduce_scatter" or "auto"'):
            Compression.dgc(parameters.items(), complete=True, **exchange)
    with pytest.raises(TypeError, match="complete must be True or False, got 1"):
        Compression.dgc(parameters.items(), exchange="reduce_scatter", complete=1)


def test_completing_adds_what_ranks_had_not_selected():
    """Rank 0 alone selects element 0, but all have something there: all of it arrives, and all residuals are clear."""
    parameters = {"weight": torch.nn.Parameter(torch.zeros(200))}
    settings = {"density": 0.005, "min_numel": 0, "complete": True, **SCATTER}
    compressor = Compression.gradient_dropping(parameters.items(), **settings)
    gradient = np.zeros(200, np.float32)
    gradient[0] = 9.0 if hvd.rank() == 0 else 1.0
    gradient[1] = 0.0 if hvd.rank() == 0 else 2.0  # what other ranks select
    reduced = drive(compressor, parameters, {"weight": gradient})["weight"]
    if hvd.size() > 1:
        assert reduced[0] == 9.0 + hvd.size() - 1
        assert memory_of(compressor, parameters, "weight")[0] == 0.0


@pytest.mark.parametrize("values", ["float32", "float16", "int1"])
def test_buckets_are_filled_by_the_bytes_that_are_sent(values):
    """Messages hold float32 values until they are sent; `bucket_bytes` is not about those."""
    shapes = {f"w{number}": (300,) for number in range(8)}
    parameters = make_parameters(shapes)
    settings = {"values": values, "bucket_bytes": 200, "min_numel": 0, **SCATTER}
    compressor = Compression.gradient_dropping(parameters.items(), 0.05, **settings)
    for t in range(2):
        drive(compressor, parameters, draw(shapes, t, hvd.rank()))
    if hvd.size() > 1:
        each = wire.payload_size(300, 15, value_dtype=values)
        together = max(1, 200 * hvd.size() // each)
        expected = {tuple(sorted(shapes)[begin : begin + together]) for begin in range(0, 8, together)}
        assert set(compressor._step.codec.regions) == expected
