"""Train on drawn gradients in one framework, and record every payload that this rank sent: mpirun -np 2 python ... DIR.

    python parity_job.py torch|tensorflow DIR

For each case of CASES, DIR/FRAMEWORK.CASE.RANK.npz has `sent`, the payload bytes of all steps, and the parameters.
"""

import sys
from pathlib import Path

import numpy as np
import tiers
from gradients import draw

SHAPES = {"c": (3000,), "a": (40, 50), "d": (7, 11, 13), "b": (10,)}  # a joint selection is in the order of names
STEPS, LR = 50, 0.1
LOSS_SCALE = 1000.0  # not a power of two, so that a division by it rounds
SETTINGS = {"density": 0.02, "min_numel": 100, "warmup": 12}
CHANNEL = {"granularity": "channel"}
SCATTER = {"exchange": "reduce_scatter"}
DGC = {"momentum": 0.9, "weight_decay": 1e-3, "clip_norm": 15.0}
CASES = {
    f"{method}-{scope}-{number}": (method, {"scope": scope, **SETTINGS, **options})
    for scope in ("tensor", "model")
    for method, variants in {
        "gradient_dropping": [{}, {"values": "bfloat16"}],
        "dgc": [{}, {**DGC, "nesterov": True}, {**DGC, "factor_masking": False}],
        "samomentum": [{}, {"momentum": 0.3, "weight_decay": 1e-3, "values": "float16"}],
    }.items()
    for number, options in enumerate(variants)
} | {
    "dct": ("dct", {**SETTINGS, "lifespan": 7, "drain": 20}),
    "dct-bfloat16": ("dct", {"density": 0.05, "min_numel": 100, "lifespan": 10, "values": "bfloat16"}),
    "hard_threshold": ("hard_threshold", {"value": 4.0, "min_numel": 100}),
    "topk": ("topk", SETTINGS),
    "cltk": ("cltk", SETTINGS),
    "micro": ("micro", SETTINGS),
    "sidco": ("sidco", {**SETTINGS, "stages": 2}),
    "sidco-gamma": ("sidco", {**SETTINGS, "distribution": "gamma"}),
    "sidco-pareto": ("sidco", {**SETTINGS, "distribution": "pareto", "stages": 3}),
    "random_k": ("random_k", {**SETTINGS, "seed": 3}),
    "gradient_dropping-int2": ("gradient_dropping", {**SETTINGS, "values": "int2"}),
    "dgc-int1-channel": ("dgc", {**SETTINGS, "scope": "model", "values": "int1", "level": "min", **CHANNEL}),
    "dct-int2-channel": ("dct", {**SETTINGS, "lifespan": 9, "values": "int2", **CHANNEL}),
    "micro-scaling": ("micro", {**SETTINGS, "controller": "scaling"}),
    "dgc-elias_fano": ("dgc", {**SETTINGS, "coding": "elias_fano"}),
    "dct-auto-int2": ("dct", {**SETTINGS, "lifespan": 5, "coding": "auto", "values": "int2"}),
    "micro-bitmap": ("micro", {**SETTINGS, "coding": "bitmap"}),
    "micro-int1": ("micro", {**SETTINGS, "values": "int1"}),
    "cltk-float16": ("cltk", {**SETTINGS, "values": "float16"}),
    "dgc-scattered": ("dgc", {**SETTINGS, **DGC, **SCATTER}),
    "gradient_dropping-scattered-int2": ("gradient_dropping", {**SETTINGS, **SCATTER, "values": "int2", **CHANNEL}),
    "samomentum-scattered": ("samomentum", {**SETTINGS, **SCATTER, "scope": "model", "values": "float16"}),
    "dgc-completed": ("dgc", {**SETTINGS, **SCATTER, "complete": True}),
    "samomentum-completed": ("samomentum", {**SETTINGS, **SCATTER, "complete": True, "values": "int2"}),
    "random_k-int2-channel": ("random_k", {**SETTINGS, "values": "int2", "level": "min", **CHANNEL}),
}
ALL_CASES = CASES
if not tiers.ALL:
    chosen = [*list(CASES.items())[::5], *(case for case in CASES.items() if "dgc-scattered" in case[0])]
    CASES = dict(chosen)  # cases with both scopes and several methods


def gradients_of(step, rank):
    drawn = draw(SHAPES, step, rank, seed=5)
    return {name: (LOSS_SCALE * gradient).astype(np.float32) for name, gradient in drawn.items()}


def listen(exchange, read):
    """Return a list to which each payload is appended when it is passed to Horovod, and the values of an all-reduce."""
    heard, allgather, allreduce = [], exchange.allgather, exchange.allreduce
    exchange.allgather = lambda name, payload, *most_bytes: allgather(
        name, payload if name.startswith("configuration.") else read(payload, heard), *most_bytes
    )
    exchange.allreduce = lambda name, tensor: allreduce(name, read(tensor, heard) if "values" in name else tensor)
    alltoall = exchange.alltoall
    exchange.alltoall = lambda name, payload, splits: alltoall(name, read(payload, heard), splits)
    if hasattr(exchange, "allgather_small"):
        allgather_small = exchange.allgather_small
        exchange.allgather_small = lambda name, payload: allgather_small(name, read(payload, heard))
    return heard


def train_torch(method, settings, initial, device="cpu"):
    """Train with Horovod and PyTorch on a device; return the payloads, and the parameters."""
    import horovod.torch as hvd
    import torch

    from hvd_sparse.torch import Compression

    parameters = {name: torch.nn.Parameter(torch.tensor(value, device=device)) for name, value in initial.items()}
    compression = getattr(Compression, method)(list(parameters.items()), **settings)

    def read(payload, heard):
        heard.append(payload.numpy(force=True).tobytes())
        return payload

    assert compression._step.device.type == device, compression._step.device
    heard = listen(compression._exchange, read)
    compression.loss_scale = LOSS_SCALE
    optimizer = torch.optim.SGD(parameters.values(), lr=LR)
    optimizer = hvd.DistributedOptimizer(optimizer, list(parameters.items()), compression=compression)
    for step in range(STEPS):
        optimizer.zero_grad()
        terms = gradients_of(step, hvd.rank()).items()
        sum((parameters[name] * torch.tensor(gradient, device=device)).sum() for name, gradient in terms).backward()
        optimizer.synchronize()
        with torch.no_grad():  # SGD rounds once, TensorFlow twice; with weight decay, the difference would be sent
            for parameter in parameters.values():
                parameter -= LR / LOSS_SCALE * parameter.grad
    return heard, {name: parameter.numpy(force=True) for name, parameter in parameters.items()}


def train_ddp(method, settings, initial, device="cpu"):
    """The same under DistributedDataParallel, on any device. The process group must exist."""
    import torch
    import torch.distributed as dist
    from terms import Terms
    from torch.nn.parallel import DistributedDataParallel

    from hvd_sparse.torch.ddp import Compression

    model = Terms(initial).to(device)
    compression = getattr(Compression, method)(model.named(), **settings)

    def read(payload, heard):
        heard.append(payload.numpy(force=True).tobytes())
        return payload

    assert compression._step.device.type == device, compression._step.device
    heard = listen(compression._exchange, read)
    compression.loss_scale = LOSS_SCALE
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005)
    compression.register(wrapped)
    for step in range(STEPS):
        wrapped.zero_grad()
        wrapped(gradients_of(step, dist.get_rank())).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR / LOSS_SCALE * parameter.grad
    return heard, {name: parameter.numpy(force=True) for name, parameter in model.named()}


def train_tensorflow(method, settings, initial, device="CPU"):
    """Train with Horovod and TensorFlow, with variables on a device; return the payloads, and the parameters."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_sparse.tensorflow import Compression

    with tf.device(device):
        variables = {name: tf.Variable(value, name=name) for name, value in initial.items()}
    compression = getattr(Compression, method)(list(variables.values()), **settings)

    def read(payload, heard):
        def keep(array):
            heard.append(array.tobytes())
            return array

        kept = tf.numpy_function(keep, [payload], payload.dtype)
        kept.set_shape([None])
        return kept

    heard = listen(compression._parts.exchange, read)
    compression.loss_scale = LOSS_SCALE

    @tf.function
    def train(gradients):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variables[name] * gradients[name]) for name in SHAPES])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        for name, reduced in zip(SHAPES, tape.gradient(loss, list(variables.values())), strict=True):
            variables[name].assign_sub(LR / LOSS_SCALE * reduced)

    for step in range(STEPS):
        train({name: tf.constant(gradient) for name, gradient in gradients_of(step, hvd.rank()).items()})
    return heard, {name: variable.numpy() for name, variable in variables.items()}


def main():
    framework, folder = sys.argv[1], Path(sys.argv[2])
    if framework == "torch":
        import horovod.torch as hvd
    else:
        import horovod.tensorflow as hvd
    hvd.init()
    initial = {name: value.astype(np.float32) for name, value in draw(SHAPES, 0, 0, seed=9).items()}
    for case, (method, settings) in CASES.items():
        heard, parameters = (train_torch if framework == "torch" else train_tensorflow)(method, settings, initial)
        sent = np.frombuffer(b"".join(heard), np.uint8)
        np.savez(folder / f"{framework}.{case}.{hvd.rank()}.npz", sent=sent, **parameters)


if __name__ == "__main__":
    main()
