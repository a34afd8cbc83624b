"""With equal gradients there is no tail to fit and no bin to divide; still about density * n elements are sent."""

import horovod.torch as hvd
import numpy as np
import pytest
from helpers import assert_ranks_agree, drive, make_parameters, memory_of, total

from hvd_sparse.torch import Compression

N = 3000
METHODS = {
    "micro": {},
    "sidco": {},
    "sidco, gamma": {"distribution": "gamma"},
    "sidco, pareto, three stages": {"distribution": "pareto", "stages": 3},
}


@pytest.mark.parametrize("kind", METHODS)
def test_about_k_are_sent_of_equal_gradients(kind):
    """30 steps of gradients of magnitude 2.0; each sent element includes its whole residual."""
    shapes = {"only": (N,)}
    parameters = make_parameters(shapes)
    compression = getattr(Compression, kind.split(",")[0])(parameters.items(), density=0.01, **METHODS[kind])
    gradient = np.where(np.arange(N) % 3, 2.0, -2.0)
    counts, received = [], np.zeros(N)
    for _ in range(30):
        reduced = drive(compression, parameters, {"only": gradient}, op=hvd.Sum)
        received += reduced["only"].double().numpy()
        counts.append(compression.stats()["step"]["density"] * N)
        assert_ranks_agree(reduced)
    assert all(15 <= count <= 60 for count in counts), counts
    assert 25 <= np.mean(counts) <= 35
    waiting = total(memory_of(compression, parameters, "only")).numpy()
    np.testing.assert_array_equal(received + waiting, 30 * hvd.size() * gradient)
    first = np.flatnonzero(received)
    assert first.min() < N // 4 and first.max() > 3 * N // 4, "no favour to a position"
