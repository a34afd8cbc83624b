"""16-bit gradients: residuals keep what a sum of payloads loses by rounding or overflow.

Residuals and sums of payloads are float32. A sum may overflow in float16, and both 16-bit types round it. The sum of a
dense step is rounded as in dense training, and only in a hierarchical exchange is the rest kept.
"""

import math

LARGEST_FLOAT16 = 65504.0
HALF = ("float16", "bfloat16")


def largest_sent(world_size: int, averages: bool) -> float:
    """Return the largest magnitude of values whose sum, or average, over all ranks is a finite float16.

    It is a multiple of its own float16 spacing, so that larger values are cut off there without rounding.
    """
    bound = LARGEST_FLOAT16 if averages else LARGEST_FLOAT16 / world_size
    mantissa, exponent = math.frexp(bound)
    return math.ldexp(math.floor(mantissa * 2048), exponent - 11)


def rest_of(rank: int, world_size: int) -> float:
    """Return the part of a sum's rounding error that goes back to the residual of one rank.

    The parts are powers of two, except that of rank 0, which gets the rest: no part is rounded, and their sum is exact.
    """
    whole = 1 << (world_size - 1).bit_length()
    return (whole - world_size + 1 if rank == 0 else 1) / whole
