"""16-bit gradients: residuals keep what a reduced gradient loses by rounding or overflow.

A residual is float32, and so is a sum of payloads: in float16 it may be infinite, in both types it is rounded.
"""

import math

LARGEST_FLOAT16 = 65504.0
HALF = ("float16", "bfloat16")


def largest_sent(ranks: int, averages: bool) -> float:
    """Return how large a value of each of `ranks` may be, so that their sum, or average, is a finite float16.

    A multiple of its own float16 spacing: what is larger is cut there without rounding.
    """
    bound = LARGEST_FLOAT16 if averages else LARGEST_FLOAT16 / ranks
    mantissa, exponent = math.frexp(bound)
    return math.ldexp(math.floor(mantissa * 2048), exponent - 11)


def rest_of(rank: int, ranks: int) -> float:
    """Return what part of the rest of a sum over ranks goes back to the residual of one of them.

    Powers of two, but for rank 0, which takes what the others leave: no part is rounded, and together they are all.
    """
    whole = 1 << (ranks - 1).bit_length()
    return (whole - ranks + 1 if rank == 0 else 1) / whole
