"""A compressor's memory as a checkpoint, of one rank or summed over all: NumPy arrays in plain dicts.

The twin of `hvd_sparse.torch.state`, with the same layout; which buffers stand in it is fixed here, where they are
made at once.
"""

import numpy as np
import tensorflow as tf

from hvd_sparse.checkpoint import VERSION, check_state, on_host, refused


def gather_state(compressor, exchange, summed: bool, session) -> dict:
    """Return {"version", "step", "ranks", "summed", "memory": {name: {buffer: float32[n]}}}; collective if summed."""
    keys = [(name, kind) for name, memory in compressor.memories.items() for kind in memory.buffers]
    buffers = [compressor.memories[name].buffers[kind] for name, kind in keys]
    if summed and exchange.is_used():
        buffers = [
            exchange.allreduce(f"state.{name}.{kind}", buffer.read_value())
            for (name, kind), buffer in zip(keys, buffers, strict=True)
        ]
    step, *values = evaluate([compressor.step, *buffers], session)
    memory: dict[str, dict] = {name: {} for name in compressor.memories}
    for (name, kind), value in zip(keys, values, strict=True):
        memory[name][kind] = np.array(value)
    return {"version": VERSION, "step": int(step), "ranks": exchange.size(), "summed": summed, "memory": memory}


def restore_state(compressor, state: dict, exchange, session) -> None:
    """Fill the buffers and the step from a state; all is checked, on every rank, before anything is changed."""
    memories = compressor.memories
    exchange.refuse_together(refused(lambda: _check(memories, state, exchange.size())), session)
    share = 1.0 / exchange.size() if state["summed"] else 1.0
    changes = [compressor.step.assign(state["step"])]
    for name, memory in memories.items():
        saved = state["memory"][name]
        for kind, buffer in memory.buffers.items():
            value = on_host(saved[kind]) if kind in saved else np.zeros(memory.size)
            changes.append(buffer.assign(value.astype(np.float32) * np.float32(share)))
    evaluate(changes, session)


def _check(memories, state: dict, ranks: int) -> None:
    """Raise ValueError unless a state fits the memories."""
    check_state(state, {n: m.size for n, m in memories.items()}, {n: m.BUFFERS for n, m in memories.items()}, ranks)
    for name, memory in memories.items():
        for kind, saved in state["memory"][name].items():
            if kind not in memory.buffers and np.any(on_host(saved)):
                raise ValueError(
                    f"{name}: the state has a {kind} that would be lost, as the variable travels dense now: give the "
                    "compression the min_numel that it had"
                )


def evaluate(values: list, session) -> list:
    """Return the values of variables and tensors, read now or by a session."""
    if tf.executing_eagerly():
        return [value.numpy() for value in values]
    if session is None:
        raise ValueError("hvd_sparse: a graph of TensorFlow 1 is read through a session; pass session=...")
    return session.run(values)
