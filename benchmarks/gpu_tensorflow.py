"""Time a step of DGC in TensorFlow with gradients on a GPU: error feedback beside them, or on the CPU.

    horovodrun -np 2 --gloo python benchmarks/gpu_tensorflow.py

The ranks share the GPU, and send their payloads over the loopback. Needs a TensorFlow that sees a GPU, and operators
built for CUDA. Prints a table.
"""

import os
import statistics
import time

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
import horovod.tensorflow as hvd
import tensorflow as tf

import hvd_sparse.tensorflow.compression as compression_module
from hvd_sparse.tensorflow import Compression, reduce_gradients
from hvd_sparse.tensorflow.devices import CPU

SHAPES = {"1 x 50,000,000": [50_000_000], "160 x 20,000": [20_000] * 160}
STEPS, IDLE_STEPS = 12, 4
DENSITY, MOMENTUM = 0.001, 0.9


def time_steps(sizes: list[int]) -> tuple[str, float]:
    """Return where the error feedback is, and the median milliseconds of a step: encode, exchange, decode, sum up."""
    with tf.device("GPU:0"):
        variables = [tf.Variable(tf.zeros([size]), name=f"variable_{i}") for i, size in enumerate(sizes)]
        gradients = [tf.random.stateless_normal([size], [i, hvd.rank()]) for i, size in enumerate(sizes)]
    compression = Compression.dgc(variables, density=DENSITY, momentum=MOMENTUM)

    @tf.function
    def step():
        """Reduce the gradients; return a number of each, so that all of them are waited for."""
        return [tf.reduce_sum(one) for one in reduce_gradients(gradients, variables, compression=compression)]

    seconds = []
    for _ in range(IDLE_STEPS + STEPS):
        start = time.perf_counter()
        for total in step():
            total.numpy()
        seconds.append(time.perf_counter() - start)
    device = compression.feedback["variable_0"].residual.device
    return device.rpartition("device:")[2], 1000 * statistics.median(seconds[IDLE_STEPS:])


def main() -> None:
    """Time each model both ways, and print the table on rank 0."""
    hvd.init()
    if not tf.config.list_physical_devices("GPU"):
        raise SystemExit("benchmarks/gpu_tensorflow.py: TensorFlow sees no GPU; run it where there is one")
    beside = compression_module.place_buffers
    lines = ["| gradients | error feedback on | ms a step |", "|---|---|---:|"]
    for title, sizes in SHAPES.items():
        for place in (beside, lambda *arguments, warns: CPU):
            compression_module.place_buffers = place
            device, milliseconds = time_steps(sizes)
            lines.append(f"| {title} | {device} | {milliseconds:.1f} |")
    if hvd.rank() == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
