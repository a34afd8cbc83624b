"""Write tests/native/corpus: a few small inputs of fuzz_payload.cc, which documents their layout.

python tests/native/make_corpus.py; every run writes the same files.
"""

import math
import pathlib
import struct

import numpy as np

from hvd_sparse import reference, wire

FOLDER = pathlib.Path(__file__).parent / "corpus"
CODINGS = ["run_length", "dense", "elias_fano", "bitmap", "auto"]
DTYPES = ["float32", "float64", "float16", "bfloat16", "none", "int2", "int1"]
FITTED, TITLED, LARGE = 1, 2, 0x50
FEW = (1, 3, 4, 9)  # of ten
THREE_BLOCKS = (0, 65_535, 65_536, 70_000, 131_081)
VALUES = (1.5, -0.25, math.inf, -0.0, 1e-45)


def format_bytes(n, k, coding, value_dtype, segments=(), flags=0, ranks=1):
    """Return what stands before the payload."""
    numbers = [flags, CODINGS.index(coding), DTYPES.index(value_dtype), len(segments)]
    start = bytes(numbers) + (n - 1).to_bytes(3, "little") + k.to_bytes(3, "little") + bytes([ranks - 1])
    return start + b"".join(struct.pack("<HH", *segment) for segment in segments)


def entry(n, indices, coding, value_dtype, segments=(), flags=0, ranks=1, k=None):
    """Return an input whose bytes are a payload, of nothing if k is given."""
    k = len(indices) if k is None else k
    values = np.resize(np.array(VALUES, "f8" if value_dtype == "float64" else "f4"), len(indices))
    if value_dtype in ("int2", "int1"):
        values = reference.quantize(values, value_dtype, "mean", np.array(indices), segments or None)
    payload = reference.pack(indices, values, n, k, coding, value_dtype, segments or None)
    return format_bytes(n, k, coding, value_dtype, segments, flags, ranks) + payload.tobytes()


def full_blocks():
    """Return an input of two full blocks: 131,072 runs, all zero, which fitting adds again."""
    n = k = 2 * wire.BLOCK
    whole = entry(n, range(n), "run_length", "none", flags=FITTED | TITLED | LARGE)
    return whole[: len(format_bytes(n, k, "run_length", "none")) + wire.HEADER_BYTES + 5]


def inputs():
    """Yield names and inputs."""
    for number, dtype in enumerate(DTYPES):
        for coding in CODINGS:
            name, flags, ranks = f"{coding}-{dtype}", number % 4, 1 + number % 3
            indices, n = (range(5), 5) if coding == "dense" else (FEW, 10)
            yield name, entry(n, indices, coding, dtype, flags=flags, ranks=ranks)
            if coding == "run_length" or (coding == "elias_fano" and number % 2 == 0):
                yield f"{name}-blocks", entry(131_082, THREE_BLOCKS, coding, dtype, flags=FITTED | TITLED | LARGE)
            if number % 3 == 0 and coding != "dense":
                yield f"{name}-nothing", entry(1000, (), coding, dtype, flags=flags, k=5)
            if dtype in ("int2", "int1"):
                yield f"{name}-segments", entry(n, indices, coding, dtype, [(0, 2), (4, 1)], FITTED)
    yield "auto-float32-dense", entry(3, range(3), "auto", "float32", flags=FITTED)
    yield "run_length-none-full_blocks", full_blocks()


def main():
    """Write the files, and delete files that are no longer part of the corpus."""
    FOLDER.mkdir(exist_ok=True)
    files = dict(inputs())
    for path in FOLDER.iterdir():
        if path.name not in files:
            path.unlink()
    for name, data in files.items():
        (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
