"""Nothing is lost: for each element, the gradients of all ranks = sent + residuals. And exactly k elements are sent.

With whole-numbered gradients every float32 sum is exact, so the test compares with ==, in float64.
"""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import SCOPES, SHAPES, draw, shuffled, whole_numbers
from helpers import assert_ranks_agree, distributed, drive, everywhere, make_parameters, memory_of, step, total

from hvd_sparse.schedule import Schedule, WarmUp
from hvd_sparse.torch import Compression


class Wave(Schedule):
    """Dense now and then, so that residuals have to leave with a dense tensor too."""

    def density(self, step):
        return (0.02, 1.0, 0.1, 0.02, 0.5)[step % 5]

    def describe(self):
        return "wave"


class Ledger:
    """What was fed in and what came out, per element, float64, over all ranks of a process set."""

    def __init__(self, parameters, process_set=hvd.global_process_set):
        self.parameters, self.process_set = parameters, process_set
        self.fed = {name: torch.zeros(parameter.numel(), dtype=torch.float64) for name, parameter in parameters.items()}
        self.sent = {name: value.clone() for name, value in self.fed.items()}

    def feed(self, gradients):
        for name, gradient in gradients.items():
            self.fed[name] += torch.tensor(gradient).reshape(-1)

    def receive(self, reduced):
        for name, result in reduced.items():
            self.sent[name] += result.detach().double().reshape(-1)

    def check(self, compressor, tolerance=0.0):
        """Assert the balance; return how much is still to be sent."""
        waiting = 0.0
        for name in self.parameters:
            residual = total(memory_of(compressor, self.parameters, name), self.process_set)
            fed = total(self.fed[name], self.process_set)
            difference = (fed - self.sent[name] - residual).abs().max().item()
            assert difference <= tolerance, f"{name}: {difference} got lost"
            waiting += residual.abs().sum().item()
        return waiting


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("method", ["gradient_dropping", "dgc"])
def test_nothing_is_lost(method, values, scope):
    """Rounding on the wire returns to the residual; the compressor is driven without Horovod's optimizer."""
    parameters = make_parameters()
    settings = {"momentum": 0.0} if method == "dgc" else {}
    make = getattr(Compression, method)
    compressor = make(parameters.items(), density=0.02, values=values, scope=scope, min_numel=100, **settings)
    ledger = Ledger(parameters)
    rounded = False
    for t in range(25):
        gradients = whole_numbers(SHAPES, t, hvd.rank(), most=9999)  # float16 has 11 bits, bfloat16 8
        ledger.feed(gradients)
        ledger.receive(drive(compressor, parameters, gradients, order=shuffled(gradients, t, hvd.rank())))
        residual = memory_of(compressor, parameters, "head.weight")
        rounded |= bool(((residual != 0) & (residual.abs() <= 64)).any())
    assert ledger.check(compressor) > 0.0
    assert rounded or values == "float32"


@pytest.mark.parametrize("scope", SCOPES)
def test_nothing_is_lost_through_the_optimizer(scope):
    """lr 1, op=Sum: the parameters themselves are the ledger."""
    parameters = {name: torch.nn.Parameter(parameter.detach().round()) for name, parameter in make_parameters().items()}
    before = {name: parameter.detach().double() for name, parameter in parameters.items()}
    compressor = Compression.gradient_dropping(parameters.items(), density=0.02, scope=scope, min_numel=100)
    optimizer = distributed(parameters, compressor, lr=1.0, op=hvd.Sum)
    ledger = Ledger(parameters)
    for t in range(50):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        ledger.feed(gradients)
        step(optimizer, parameters, gradients, shuffled(parameters, t, hvd.rank()))
    ledger.receive({name: before[name] - parameter.detach().double() for name, parameter in parameters.items()})
    assert ledger.check(compressor) > 0.0
    assert_ranks_agree(parameters)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("schedule", [WarmUp(0.01, steps=12, initial=1.0), Wave()], ids=["warm_up", "wave"])
def test_nothing_is_lost_when_the_density_changes(schedule, scope):
    parameters = make_parameters()
    compressor = Compression.gradient_dropping(parameters.items(), density=schedule, scope=scope, min_numel=100)
    ledger = Ledger(parameters)
    for t in range(18):
        gradients = whole_numbers(SHAPES, t, hvd.rank())
        ledger.feed(gradients)
        ledger.receive(drive(compressor, parameters, gradients, order=shuffled(gradients, t, hvd.rank())))
        if schedule.density(t) == 1.0:
            assert ledger.check(compressor) == 0.0, "a dense step sends what had been kept back"
    assert ledger.check(compressor) > 0.0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_what_momentum_makes_is_conserved_too(nesterov, scope):
    """Without masking, sent + residual is what dense momentum would have applied, over all steps."""
    parameters = make_parameters()
    m = 0.5
    compressor = Compression.dgc(
        parameters.items(), 0.02, momentum=m, nesterov=nesterov, factor_masking=False, scope=scope, min_numel=100
    )
    ledger = Ledger(parameters)
    velocity = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for t in range(20):
        gradients = draw(SHAPES, t, hvd.rank())
        velocity = {name: m * velocity[name] + gradients[name] for name in SHAPES}
        applied = {name: m * velocity[name] + gradients[name] if nesterov else velocity[name] for name in SHAPES}
        ledger.feed(applied)
        ledger.receive(drive(compressor, parameters, gradients))
    assert ledger.check(compressor, tolerance=1e-5 * hvd.size()) > 0.0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("ties", [False, True])
def test_each_rank_sends_exactly_k(ties, scope):
    """One rank after the other has a gradient; what comes out is that rank's contribution."""
    shapes = {"a": (2000,), "b": (50, 30), "c": (1200,)}
    parameters = make_parameters(shapes)
    for sender in range(hvd.size()):
        compressor = Compression.gradient_dropping(parameters.items(), density=0.01, scope=scope)
        for t in range(4):
            gradients = {name: np.zeros(shape) for name, shape in shapes.items()}
            if hvd.rank() == sender:
                gradients = {name: np.ones(shape) for name, shape in shapes.items()} if ties else draw(shapes, t, 0)
            reduced = drive(compressor, parameters, gradients)
            counts = {name: int(result.count_nonzero()) for name, result in reduced.items()}
            if scope == "tensor":
                assert counts == {"a": 20, "b": 15, "c": 12}
            else:
                assert sum(counts.values()) == 47


@pytest.mark.parametrize("scope", SCOPES)
def test_ties_are_cut_without_favour_to_any_position(scope):
    """All magnitudes equal: neither the first nor the last, but a fair sample, another one on each rank's turn."""
    n, k = 20_000, 400
    parameters = make_parameters({"weight": (n,)})
    compressor = Compression.gradient_dropping(parameters.items(), density=k / n, scope=scope, seed=5)
    signs = np.where(np.arange(n) % 3 == 0, -1.0, 1.0)
    chosen = drive(compressor, parameters, {"weight": signs})["weight"].nonzero().reshape(-1).numpy()
    assert chosen.size == k, "equal data and seed: all ranks choose alike"
    quarters = np.bincount(chosen * 4 // n, minlength=4)
    assert quarters.min() > 60 and quarters.max() < 140, quarters  # 100 expected, standard deviation 8.7
    again = drive(compressor, parameters, {"weight": signs})["weight"].nonzero().reshape(-1).numpy()
    assert not set(chosen) & set(again), "what was sent has less residual than what was not"
    fresh = Compression.gradient_dropping(parameters.items(), density=k / n, scope=scope, seed=6)
    other = drive(fresh, parameters, {"weight": signs})["weight"].nonzero().reshape(-1).numpy()
    assert len(set(chosen) & set(other)) < 40, "another seed, another choice: 8 expected in common"
    later = Compression.gradient_dropping(parameters.items(), density=k / n, scope=scope, seed=5)
    later.load_state_dict({**later.state_dict(), "step": 7})
    other = drive(later, parameters, {"weight": signs})["weight"].nonzero().reshape(-1).numpy()
    assert len(set(chosen) & set(other)) < 40, "another step, another choice"
    assert len({tuple(seen) for seen in everywhere(chosen.tolist())}) == 1
