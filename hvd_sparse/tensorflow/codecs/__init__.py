"""Codecs: from the gradients of a step to messages, and from the messages of all ranks to sums."""

from hvd_sparse.tensorflow.codecs.base import Codec
from hvd_sparse.tensorflow.codecs.owned_regions import OwnedRegions
from hvd_sparse.tensorflow.codecs.shared_indices import SELECTIONS, SharedIndices
from hvd_sparse.tensorflow.codecs.threshold import Threshold

CODECS: dict[str, type[Codec]] = {  # by the method's `selection`
    "tensor": OwnedRegions,
    "model": OwnedRegions,
    "threshold": Threshold,
    **dict.fromkeys(SELECTIONS, SharedIndices),
}
