"""Hypothesis strategies for the operators of both frameworks: awkward values, payloads, and damaged payloads.

Large arrays are generated from a drawn seed, so that shrinking is fast. Special values are then written to drawn
places.
"""

import itertools
import math
import struct
import zlib
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from hvd_sparse import reference, wire

WIDTHS = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
CODINGS = [*wire.CODINGS, "auto"]
EDGES = [63, 64, 65, 2047, 2048, 2049, 65_535, 65_536, 65_537]
SIZES = st.one_of(st.integers(1, 200), st.sampled_from(EDGES))
SPECIALS = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, 65504.0, 65520.0, 1.0]
SEEDS = st.integers(0, 2**32)
KINDS = {
    "normal": lambda n, rng: rng.standard_normal(n),
    "ties": lambda n, rng: rng.integers(-3, 4, n),
    "zeros": lambda n, rng: rng.choice([0.0, -0.0], n),
    "equal": lambda n, rng: rng.choice([-0.25, 0.25], n),
    "denormal": lambda n, rng: rng.integers(-9, 10, n) * rng.choice([2.0**-149, 2.0**-133, 2.0**-24], n),
    "sparse": lambda n, rng: rng.standard_normal(n) * (rng.random(n) < 0.001),
    "large": lambda n, rng: rng.choice([3.4e38, -3.4e38, 65519.0, 65520.0, -1e30], n) * rng.random(n),
}


@st.composite
def vectors(draw, n, dtype="float32", kinds=("any bits", *KINDS)):
    """Draw a torch tensor of n values."""
    kind, rng = draw(st.sampled_from(kinds)), np.random.default_rng(draw(SEEDS))
    if kind == "any bits":
        bits = np.frombuffer(rng.bytes(n * WIDTHS[dtype]), np.uint8).copy()
        return torch.from_numpy(bits).view(getattr(torch, dtype))
    values = torch.from_numpy(np.asarray(KINDS[kind](n, rng), np.float64)).to(getattr(torch, dtype))
    if kinds[0] == "any bits":
        for place, special in draw(st.lists(st.tuples(st.integers(0, n - 1), st.sampled_from(SPECIALS)), max_size=5)):
            values[place] = torch.tensor(special, dtype=torch.float64)  # may overflow, unlike a Python float
    return values


def hints(exact):
    """Draw guesses at a threshold whose value is `exact`: good, slightly wrong, or wild."""
    near = st.sampled_from([0.0, 5e-324, 0.5, 0.98, 1.0, 1.0 + 2**-52, 1.01, 2.0, math.inf])
    return st.one_of(near.map(lambda part: 0.0 if math.isnan(part * exact) else part * exact), st.floats(0, 1e40))


def counts(n):
    """Draw a number of elements out of n: few, or almost all."""
    return st.one_of(st.integers(1, min(n, 40)), st.sampled_from(sorted({1, (n + 999) // 1000, (n + 1) // 2, n})))


class Form(NamedTuple):
    """The format of a payload, which sender and receiver know."""

    n: int
    k: int
    coding: str
    value_dtype: str
    segments: np.ndarray | None

    @property
    def size(self):
        """Return the payload's size in bytes."""
        return wire.payload_size(*self)

    @property
    def code(self):
        return self.coding, self.value_dtype


@st.composite
def matrices(draw, n):
    """Draw segments that fit n elements, or None."""
    begins = [0, *sorted(draw(st.sets(st.integers(1, n - 1), max_size=3)))] if n > 1 else [0]
    lengths = np.diff([*begins, n]).tolist()
    rows = [(begin, draw(st.integers(1, min(length, 700)))) for begin, length in zip(begins, lengths, strict=True)]
    return draw(st.sampled_from([None, np.array(rows)]))


@st.composite
def forms(draw, n=None, codings=CODINGS, dtypes=tuple(wire.VALUE_DTYPES)):
    n = draw(st.one_of(st.integers(1, 100), st.sampled_from(EDGES), st.just(140_000))) if n is None else n
    coding, dtype = draw(st.sampled_from(codings)), draw(st.sampled_from(dtypes))
    k = n if coding == "dense" else draw(counts(n))
    return Form(n, k, coding, dtype, draw(matrices(n)) if dtype in wire.LOW_BITS else None)


@st.composite
def contents(draw, form, may_be_none=True):
    """Draw indices and values, and their payload by the reference: k entries, or none."""
    n, k = form.n, 0 if may_be_none and draw(st.integers(0, 4)) == 0 else form.k
    arrangement, rng = draw(st.sampled_from(["front", "back", "anywhere"])), np.random.default_rng(draw(SEEDS))
    indices = np.sort(rng.choice(n, k, replace=False)) if arrangement == "anywhere" else np.arange(k)
    indices += (n - k) * (arrangement == "back")
    wide = "float64" if form.value_dtype == "float64" else "float32"
    values = draw(vectors(max(k, 1), wide)).numpy()[:k]
    if form.value_dtype in wire.LOW_BITS:  # low-bit types have no NaN, and only quantized values
        values = np.where(np.isnan(values), np.float32(0), values)
        values = reference.quantize(values, form.value_dtype, "mean", indices, form.segments)
    return indices, values, reference.pack(indices, values, *form)


def sealed(payload):
    """Return the same bytes with a correct checksum."""
    payload = payload.copy()
    payload[24:28] = 0
    payload[24:28] = np.frombuffer(struct.pack("<I", zlib.crc32(payload.tobytes())), np.uint8)
    return payload


PLACES = st.one_of(st.integers(0, 31), st.integers(32, 80), st.integers(0, 2**20))
CHANGES = st.one_of(
    st.tuples(st.just("flip"), PLACES, st.integers(0, 7)),
    st.tuples(st.just("set"), PLACES, st.sampled_from([0, 1, 2, 127, 128, 255])),
    st.tuples(st.just("copy"), PLACES, PLACES),
    st.tuples(st.just("entries"), st.integers(0, 0), st.sampled_from([0, 1, 2, 2**16, 2**32, 2**63, 2**64 - 1])),
    st.tuples(st.just("cut"), st.integers(0, 80), st.integers(0, 0)),
    st.tuples(st.just("longer"), st.integers(1, 16), st.integers(0, 255)),
)
DAMAGE = st.lists(CHANGES, min_size=1, max_size=4)


def damaged(payload, damage):
    """Draw a changed copy of the bytes, possibly shorter or longer."""
    payload = payload.copy()
    for what, place, how in damage:
        at = place % max(1, payload.size)
        if what == "longer":
            payload = np.append(payload, np.full(place, how, np.uint8))
        elif what == "cut":
            payload = payload[: payload.size - min(place, payload.size)]
        elif what == "entries" and payload.size >= 24:
            payload[16:24] = np.frombuffer(how.to_bytes(8, "little"), np.uint8)
        elif what == "copy" and payload.size:
            payload[at : at + 8] = np.resize(payload[how % payload.size :][:8], payload[at : at + 8].size)
        elif payload.size and what in ("flip", "set"):
            payload[at] = payload[at] ^ 1 << how if what == "flip" else how
    return payload


def verdict(call, refusals=ValueError):
    """Return the result of a call, or None if it raises an error."""
    try:
        return call()
    except refusals:
        return None


@st.composite
def messages(draw):
    """Draw messages of all ranks with different counts: (ranks, members' forms, {(rank, member): Form}, bytes)."""
    ranks, ns = draw(st.integers(1, 3)), draw(st.lists(SIZES, min_size=1, max_size=3))
    coding, dtype = (
        draw(st.sampled_from([one for one in CODINGS if one != "dense"])),
        draw(st.sampled_from([*wire.VALUE_DTYPES])),
    )
    channels = [draw(st.integers(1, min(n, 300))) for n in ns]
    placed, parts = {}, []
    for rank, member in itertools.product(range(ranks), range(len(ns))):
        n, segments = ns[member], np.array([[0, channels[member]]]) if dtype in wire.LOW_BITS else None
        count = draw(st.one_of(st.just(0), counts(n)))
        form = Form(n, max(1, count), coding, dtype, segments)
        if count == 0:
            parts.append(reference.pack([], [], *form))
        else:
            parts.append(draw(contents(form, may_be_none=False))[2])
        placed[rank, member] = form
    return ranks, ns, channels, placed, np.concatenate(parts)
