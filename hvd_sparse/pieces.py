"""All-gathers of more than Horovod can count: as int64, and in several collectives where that is not enough.

Horovod's displacements are C ints, in elements of the type that is sent: past 2**31 - 1 of them a rank crashes.
Payloads are padded to 8 bytes. Sent as int64 they have room for 16 GiB. Where the ranks might send more than that
together, each puts the number of its words first, and cuts all of it into pieces of a length that depends on nothing
but what a rank may send at most: the same number of collectives on every rank, whatever it has to send.
"""

from typing import NamedTuple

WORD_BYTES = 8
MOST_WORDS = 2**31 - 1  # that one all-gather may return, of all ranks together


class Cut(NamedTuple):
    """The number and sizes of the pieces of each rank's message."""

    pieces: int  # collectives; if it is one, there is no number of words in front
    words: int  # that a rank sends in each of them at most


def plan_pieces(most_bytes: int, ranks: int) -> Cut:
    """Return how to divide messages of which none has more than `most_bytes`."""
    most = -(-most_bytes // WORD_BYTES)
    if most * ranks <= MOST_WORDS:
        return Cut(1, most)
    words = MOST_WORDS // ranks
    return Cut(-(-(most + 1) // words), words)
