"""With equal gradients there is no tail to fit and no bin to divide; still about density * n elements are sent."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
from tf_helpers import Reducer, make_variables, memory_of, several, total

from hvd_sparse.tensorflow import Compression

pytestmark = several
N = 3000


@pytest.mark.parametrize("method", ["micro", "sidco"])
def test_about_k_are_sent_of_equal_gradients(method):
    """30 steps of gradients of magnitude 2.0; each sent element includes its whole residual."""
    variables = make_variables({"only": (N,)})
    compression = getattr(Compression, method)(list(variables.values()), density=0.01)
    reduce = Reducer(variables, compression, op=hvd.Sum)
    gradient = np.where(np.arange(N) % 3, 2.0, -2.0)
    counts, received = [], np.zeros(N)
    for _ in range(30):
        received += reduce({"only": gradient})["only"]
        counts.append(compression.stats()["step"]["density"] * N)
    assert all(15 <= count <= 60 for count in counts), counts
    assert 25 <= np.mean(counts) <= 35
    waiting = total(memory_of(compression, "only"))
    np.testing.assert_array_equal(received + waiting, 30 * hvd.size() * gradient)
