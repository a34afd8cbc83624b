"""Every operator on the payloads of all ranks refuses the same numbers of ranks, with the same words."""

import pytest
import tensorflow as tf
import torch

from hvd_sparse.buckets import BucketLayout
from hvd_sparse.tensorflow import bucket_ops as tensorflow_bucket_ops
from hvd_sparse.tensorflow import ops as tensorflow_ops
from hvd_sparse.tensorflow import varying_ops as tensorflow_varying_ops
from hvd_sparse.torch import bucket_ops, ops, varying_ops
from hvd_sparse.wire import payload_size

BYTES = payload_size(1, 1)
MESSAGE = torch.zeros(BYTES, dtype=torch.uint8)


def gathered(ranks):
    """Return messages of many ranks; nothing is written to them, so that they occupy no memory."""
    return torch.empty((ranks, BYTES), dtype=torch.uint8)


def gathered_in_tensorflow(ranks):
    return tf.raw_ops.Empty(shape=[ranks, BYTES], dtype=tf.uint8, init=False)


OUT = torch.empty(1)
CALLS = {
    "reduce_payloads": lambda ranks: ops.reduce_payloads(gathered(ranks), 0, 1, 1, OUT),
    "reduce_located": lambda ranks: varying_ops.reduce_located(
        MESSAGE, torch.empty((2, ranks), dtype=torch.int64), 1, OUT
    ),
    "locate_payloads": lambda ranks: varying_ops.locate_payloads(MESSAGE, [1], ranks),
    "reduce_bucket": lambda ranks: bucket_ops.reduce_bucket(gathered(ranks), [OUT], layout=BucketLayout([1], [1])),
    "reduce_located_bucket": lambda ranks: varying_ops.reduce_located_bucket(MESSAGE, [1], ranks, [OUT], [0]),
}
TENSORFLOW_CALLS = {
    "reduce_payloads": lambda ranks: tensorflow_ops.reduce_payloads(gathered_in_tensorflow(ranks), 0, 1, 1),
    "locate_payloads": lambda ranks: tensorflow_varying_ops.locate_payloads(MESSAGE.numpy(), [1], ranks),
    "reduce_bucket": lambda ranks: tensorflow_bucket_ops.reduce_bucket(MESSAGE.numpy(), [1], ranks, [1]),
    "reduce_located_bucket": lambda ranks: tensorflow_varying_ops.reduce_located_bucket(MESSAGE.numpy(), [1], ranks),
}


@pytest.mark.parametrize("ranks", [0, 2**23 + 1])
@pytest.mark.parametrize("name", CALLS)
def test_pytorch_refuses(name, ranks):
    with pytest.raises(ValueError, match=rf"^hvd_sparse\.{name}: ranks must be in \[1, 2\^23\], got {ranks}$"):
        CALLS[name](ranks)


@pytest.mark.parametrize("ranks", [0, 2**23 + 1])
@pytest.mark.parametrize("name", TENSORFLOW_CALLS)
def test_tensorflow_refuses(name, ranks):
    message = rf"hvd_sparse\.{name}: ranks must be in \[1, 2\^23\], got {ranks}\b"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        TENSORFLOW_CALLS[name](ranks)
