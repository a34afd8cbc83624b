"""Codecs: from the gradients of a bucket to a message, and from the messages of all ranks to sums."""

from hvd_sparse.torch.codecs.base import Codec
from hvd_sparse.torch.codecs.owned_regions import OwnedRegions
from hvd_sparse.torch.codecs.shared_indices import SELECTIONS, SharedIndices
from hvd_sparse.torch.codecs.threshold import Threshold

CODECS: dict[str, type[Codec]] = {  # by the method's `selection`
    "tensor": OwnedRegions,
    "model": OwnedRegions,
    "threshold": Threshold,
    **dict.fromkeys(SELECTIONS, SharedIndices),
}
