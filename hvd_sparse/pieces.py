"""All-gathers above Horovod's size limit: payloads are sent as int64, and in several collectives if necessary.

Horovod's displacements are C ints that count elements of the sent type; a rank crashes above 2**31 - 1 of them.
Payloads are padded to 8 bytes, so that int64 elements allow 16 GiB. If the ranks together might send more than that,
each rank puts the number of its words in front and divides its message into pieces. The size of a piece depends only on
the largest possible message, so every rank takes part in the same number of collectives.
"""

from typing import NamedTuple

WORD_BYTES = 8
MOST_WORDS = 2**31 - 1  # largest result of one all-gather, from all ranks together


class Pieces(NamedTuple):
    """The number and sizes of the pieces of each rank's message."""

    pieces: int  # number of collectives; if it is 1, no number of words is sent
    words: int  # largest number of words that a rank sends in each collective


def plan_pieces(most_bytes: int, world_size: int) -> Pieces:
    """Return how to divide messages of which none has more than `most_bytes`."""
    most = -(-most_bytes // WORD_BYTES)
    if most * world_size <= MOST_WORDS:
        return Pieces(1, most)
    words = MOST_WORDS // world_size
    return Pieces(-(-(most + 1) // words), words)
