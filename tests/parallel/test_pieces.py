"""All-gathers above Horovod's size limit (lowered here) are divided into pieces, with the same results."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from gradients import draw
from helpers import drive, make_parameters
from horovod.torch import mpi_ops

from hvd_sparse import pieces
from hvd_sparse.torch import Compression
from hvd_sparse.torch.collectives.horovod import HorovodCollectives
from hvd_sparse.torch.exchange import Exchange
from hvd_sparse.torch.traffic import Traffic

SHAPES = {"big": (120, 50), "middle": (2000,), "small": (64,)}
METHODS = {  # a payload of each, with headers of 32 bytes, is longer than a piece, or may be
    "tensor": ("dgc", {"density": 0.01, "warmup": 2, "values": "int2"}),
    "model": ("topk", {"density": 0.01}),
    "threshold": ("dct", {"density": 0.02, "lifespan": 2, "coding": "auto"}),
    "leader": ("cltk", {"density": 0.01}),
    "partition": ("micro", {"density": 0.01, "values": "float16"}),
    "random": ("random_k", {"density": 0.01, "values": "float16"}),
}


def message_of(rank, size):
    return np.random.default_rng(rank).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def gathered_words(monkeypatch):
    """Lower the limit when asked; return what each all-gather brought, in words."""
    seen, original = [], mpi_ops._allgather_async

    def allgather_async(tensor, *arguments, **options):
        assert tensor.dtype == torch.int64
        seen.append(tensor)
        return original(tensor, *arguments, **options)

    monkeypatch.setattr(mpi_ops, "_allgather_async", allgather_async)
    return seen


@pytest.mark.parametrize("words", [5, 13, 40, 41, 1000])
@pytest.mark.parametrize("sizes", ["equal", "differ", "almost none"])
def test_what_all_ranks_gave_comes_in_rank_order(monkeypatch, gathered_words, words, sizes):
    own = {"equal": lambda rank: 320, "differ": lambda rank: 320 - 80 * (rank % 4), "almost none": lambda rank: 8}[
        sizes
    ]
    monkeypatch.setattr(pieces, "MOST_WORDS", words * hvd.size())
    exchange = Exchange(HorovodCollectives(None), Traffic())
    payload = torch.from_numpy(message_of(hvd.rank(), own(hvd.rank())))
    found = exchange.allgather("pieces", payload, None if sizes == "equal" else 320).wait()
    expected = np.concatenate([message_of(rank, own(rank)) for rank in range(hvd.size())])
    np.testing.assert_array_equal(found.numpy(), expected)
    count = 1 if words >= 40 else -(-41 // words)  # 40 words, and their number where there are several pieces
    assert len(gathered_words) == count and all(1 <= len(part) <= words for part in gathered_words)


def test_a_message_that_breaks_its_bound_is_refused(monkeypatch):
    monkeypatch.setattr(pieces, "MOST_WORDS", 5 * hvd.size())
    with pytest.raises(RuntimeError, match="100 words do not fit into 9 pieces of 5"):
        Exchange(HorovodCollectives(None), Traffic()).allgather("pieces", torch.zeros(800, dtype=torch.uint8), 320)


def run(method, settings):
    parameters = make_parameters(SHAPES)
    compressor = getattr(Compression, method)(parameters.items(), **settings)
    sums = [drive(compressor, parameters, draw(SHAPES, step, hvd.rank())) for step in range(4)]
    stats = compressor.stats()["total"]
    return sums, compressor.state_dict()["memory"], stats


@pytest.mark.parametrize("layout", METHODS)
def test_every_method_does_the_same_in_pieces(monkeypatch, gathered_words, layout):
    method, settings = METHODS[layout]
    *expected, whole = run(method, settings)
    calls = len(gathered_words)
    monkeypatch.setattr(pieces, "MOST_WORDS", 16 * hvd.size())
    *found, cut = run(method, settings)
    assert len(gathered_words) > 2 * calls and all(len(part) <= 16 for part in gathered_words[calls:])
    # Dense sums are Horovod's own, which from three ranks on adds in an order that varies.
    rounding = 0.0 if hvd.size() <= 2 else 1e-5
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)
    assert cut["payload_bytes"] > whole["payload_bytes"]
    if hvd.size() > 1:
        assert cut["received_bytes"] > whole["received_bytes"]
