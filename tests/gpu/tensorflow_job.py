"""TensorFlow's operators and compressors on a GPU: python tensorflow_job.py ops|parity FOLDER.

    ops      calls each operator that has a GPU kernel on the CPU and on the GPU, and compares the results
    parity   trains cases of parity_job with variables on the CPU and on the GPU, and compares payloads and parameters

test_gpu_tensorflow.py starts it, for `parity` as two ranks under Horovod. Each rank writes FOLDER/RANK.json.
"""

import itertools
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # ranks share a GPU
import horovod.tensorflow as hvd
import numpy as np
import parity_job
import tensorflow as tf
from kinds import MAKERS
from parity import compare_parity, report

from hvd_sparse.tensorflow import Compression, bucket_ops, ops, row_ops

CPU, GPU = "CPU:0", "GPU:0"
SIZES = (1, 2, 257, 65_537, 1_000_003)
NUMELS = (1, 7, 1000, 65_537)
RULES = ({}, {"momentum": 0.9}, {"momentum": 0.7, "nesterov": True, "weight_decay": 0.01})
FORMS = (
    {},
    {"value_dtype": "float16", "coding": "elias_fano"},
    {"value_dtype": "bfloat16", "coding": "auto"},
    {"value_dtype": "int2", "coding": "bitmap"},
    {"value_dtype": "int1"},
)
METHODS = ("gradient_dropping", "dgc", "samomentum", "topk")  # whose error feedback is beside the variables


def make(kind, n, seed=0):
    """Draw values, float32[n], the same for the same arguments."""
    return MAKERS[kind](n, np.random.default_rng([seed, n])).astype(np.float32)


def finiteness():
    """Yield whether all values are finite."""
    for kind, n, dtype in itertools.product(MAKERS, SIZES, ("float32", "float64", "float16", "bfloat16")):
        yield f"all_finite {kind} {n} {dtype}", [ops.all_finite(tf.cast(make(kind, n), dtype))]


def buckets():
    """Yield messages, sums and buffers of three steps of buckets."""
    for rule, form, joint in itertools.product(RULES, FORMS, (False, True)):
        residuals = [tf.Variable(make("normal", n, 1)) for n in NUMELS]
        velocities = [tf.Variable(make("normal", n, 2)) for n in NUMELS] if rule else []
        parameters = [tf.constant(make("normal", n, 3)) for n in NUMELS] if "weight_decay" in rule else []
        ks = [max(1, n // 100) for n in ([sum(NUMELS)] if joint else NUMELS)]
        form = {**form, "joint": joint}
        for step, hint in enumerate((0.0, 2.0, 1e6)):
            gradients = [tf.constant(make("normal", n, 10 + step)) for n in NUMELS]
            kept = residuals[3].read_value()  # still held: the variable continues with a copy
            arguments = {"factors": [0.5] * len(NUMELS), "ks": ks, "threshold_hints": [hint] * len(ks), "seed": step}
            lists = (gradients, residuals, velocities, parameters)
            message, finite, info = bucket_ops.accumulate_bucket(*lists, **arguments, **rule, **form)
            sums = bucket_ops.reduce_bucket(tf.concat([message] * 2, 0), NUMELS, 2, ks, 0.5, **form)
            for void in (True, False):
                bucket_ops.clear_bucket(message, ks, void, residuals, velocities, **form)
            token, shape = tf.constant([1.0, 0.0]), tf.TensorShape([10, 100])
            taken = [ops.take_sum(sums[2], token, 1.0, void, shape) for void in (False, True)]
            results = [message, finite, info[:, 0], *sums, *residuals, *velocities, *taken, kept]
            yield f"bucket {rule} {form} {step}", results


def rows():
    """Yield masks and thresholds of rows."""
    for kind, (batch, columns) in itertools.product(MAKERS, ((1, 1), (7, 33), (64, 1000), (3, 40_000))):
        values = make(kind, batch * columns).reshape(batch, columns)
        thresholds = row_ops.laplace_threshold_rows(values, 0.1)
        mask = row_ops.filter_threshold_rows(values, thresholds)
        selected = row_ops.select_top_k_rows(values, max(1, columns // 10), 5)
        yield f"rows {kind} {batch} {columns}", [thresholds, mask, *selected]


def run_on(device, make_results):
    """Return {name: [tensor]} of a generator whose operators run on a device."""
    with tf.device(device):
        return {name: [tf.convert_to_tensor(one) for one in results] for name, results in make_results()}


def compare_ops():
    """Compare all operators; a difference of the device is one, too."""
    wrong = []
    for make_results in (finiteness, buckets, rows):
        expected, found = run_on(CPU, make_results), run_on(GPU, make_results)
        for name, results in expected.items():
            pairs = list(zip(results, found[name], strict=True))
            away = [one.device for _, one in pairs if not one.device.endswith("GPU:0")]
            differing = [at for at, pair in enumerate(pairs) if not is_same(*pair)]
            wrong.append(f"{name}: results {differing} differ, {away}" if differing or away else "")
    return report([*wrong, *refusals()])


def refusals():
    """Return what is wrong about the errors for damaged payloads on the GPU; empty strings if nothing is."""
    n, k = 1000, 10
    with tf.device(GPU):
        residual = tf.Variable(make("normal", n))
        numbers = {"factors": [1.0], "ks": [k], "threshold_hints": [0.0]}
        message = bucket_ops.accumulate_bucket([tf.constant(make("normal", n, 1))], [residual], **numbers)[0]
        damaged = message.numpy()
        damaged[34] ^= 1
        before, both = residual.numpy(), tf.concat([message, damaged], 0)
        calls = {
            "reduce_bucket: from rank 1: payload checksum": lambda: bucket_ops.reduce_bucket(both, [n], 2, [k]),
            "clear_bucket: payload checksum": lambda: bucket_ops.clear_bucket(damaged, [k], False, [residual]),
        }
        wrong = ["" if refuses(call, says) else f"no error that says {says}" for says, call in calls.items()]
    return [*wrong, "" if residual.numpy().tobytes() == before.tobytes() else "a damaged message cleared entries"]


def refuses(call, says):
    """Return whether a call raises an error that says so."""
    try:
        call()
    except tf.errors.InvalidArgumentError as error:
        return says in str(error)
    return False


def is_same(expected, found):
    """Return whether two tensors have the same bits; NaN only has to be in the same places."""
    expected, found = expected.numpy(), found.numpy()
    if expected.dtype.kind in "fV":
        nan = np.isnan(expected.astype(np.float64)) & np.isnan(found.astype(np.float64))
        expected, found = (np.where(nan, np.zeros_like(one), one) for one in (expected, found))
    return expected.shape == found.shape and expected.tobytes() == found.tobytes()


def place_of(method):
    """Return the device of the residual of a variable on the GPU."""
    with tf.device(GPU):
        variable = tf.Variable(tf.zeros([10_000]), name="variable")
    return getattr(Compression, method)([variable], density=0.1).feedback["variable"].residual.device


def compare_training():
    """Compare all cases whose error feedback is beside the variables, and one case of each other method."""
    assert place_of("dgc").endswith(GPU)
    assert place_of("micro").endswith(CPU)
    beside = {case: what for case, what in parity_job.ALL_CASES.items() if what[0] in METHODS}
    others = {what[0]: (case, what) for case, what in parity_job.ALL_CASES.items() if what[0] not in METHODS}
    return compare_parity(parity_job.train_tensorflow, beside | dict(others.values()), devices=(CPU, GPU))


def main():
    """Run as one rank."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    hvd.init()
    compare = {"ops": compare_ops, "parity": compare_training}[what]
    result = compare() if tf.config.list_physical_devices("GPU") else None
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
