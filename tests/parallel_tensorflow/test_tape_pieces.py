"""All-gathers above Horovod's size limit (lowered here) are divided into pieces, with the same results."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
import tiers
from gradients import draw
from tf_helpers import Reducer, make_variables, several

from hvd_sparse import pieces
from hvd_sparse.tensorflow import Compression, exchange
from hvd_sparse.tensorflow.exchange import Exchange

SHAPES = {"big": (120, 50), "middle": (2000,), "small": (64,)}
METHODS = {  # with a limit, in words of a rank, and the pieces of what it may send at most: its words, and their number
    "tensor": ("dgc", {"density": 0.01, "warmup": 2, "values": "int2"}, 400, 2),  # 436 + 155 at density 0.25
    "model": ("topk", {"density": 0.01}, 30, 3),  # 73
    "threshold": ("dct", {"density": 0.02, "lifespan": 2, "coding": "auto"}, 2000, 3),  # 3,106 + 1,044 at density 1
    "leader": ("cltk", {"density": 0.01}, 800, 3),  # 2,013: as many indices as elements
    "partition": ("micro", {"density": 0.01, "values": "float16"}, 800, 3),  # 2,013 for indices, 2,045 for values
}


def message_of(rank, size):
    return np.random.default_rng(rank).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize(("words", "count"), [(5, 9), (13, 4), (40, 1)])
def test_what_all_ranks_gave_comes_in_rank_order(monkeypatch, words, count):
    monkeypatch.setattr(pieces, "MOST_WORDS", words * hvd.size())
    seen, original = [], hvd.allgather

    def allgather(tensor, **options):
        seen.append(tensor)
        return original(tensor, **options)

    monkeypatch.setattr(hvd, "allgather", allgather)
    own = [320 - 80 * (rank % 4) for rank in range(hvd.size())]
    found = Exchange().allgather("pieces", tf.constant(message_of(hvd.rank(), own[hvd.rank()])), 320)
    np.testing.assert_array_equal(found, np.concatenate([message_of(*item) for item in enumerate(own)]))
    assert len(seen) == count and all(part.dtype == tf.int64 and 1 <= len(part) <= words for part in seen)


@several
@pytest.mark.parametrize("layout", tiers.choice(METHODS, "tensor", "threshold", "partition"))
def test_every_method_does_the_same_in_pieces(monkeypatch, layout):
    method, settings, words, count = METHODS[layout]

    def run():
        variables = make_variables(SHAPES)
        compression = getattr(Compression, method)(list(variables.values()), **settings)
        reducer = Reducer(variables, compression)
        return [reducer(draw(SHAPES, step, hvd.rank())) for step in range(3)], compression.state_dict()["memory"]

    expected = run()
    cuts, original = [], exchange.plan_pieces
    monkeypatch.setattr(exchange, "plan_pieces", lambda *arguments: cuts.append(original(*arguments)) or cuts[-1])
    monkeypatch.setattr(pieces, "MOST_WORDS", words * hvd.size())
    found = run()
    assert max(cut.pieces for cut in cuts) == count
    rounding = 0.0 if hvd.size() <= 2 else 1e-5
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)
