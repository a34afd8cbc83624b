"""A compressor's memory as a checkpoint, of one rank or summed over all."""

from collections.abc import Mapping

import torch

from hvd_sparse.checkpoint import VERSION, check_state, refused
from hvd_sparse.torch.exchange import Exchange
from hvd_sparse.torch.memory import ResidualMemory


def gather_state(memories: Mapping[str, ResidualMemory], step: int, exchange: Exchange, summed: bool) -> dict:
    """Return {"version", "step", "ranks", "summed", "memory": {name: {buffer: float32[n]}}}; collective if summed."""
    memory = {name: _copies(memories[name], every=summed) for name in sorted(memories)}
    if summed:
        sums = [
            exchange.allreduce(f"state.{name}.{kind}", buffer)
            for name, buffers in memory.items()
            for kind, buffer in buffers.items()
        ]
        for pending in sums:
            pending.wait()
    return {"version": VERSION, "step": step, "ranks": exchange.size(), "summed": summed, "memory": memory}


def _copies(memory: ResidualMemory, every: bool) -> dict[str, torch.Tensor]:
    """Copy the buffers that were made, or `every` one: which were made may differ between ranks."""
    empty = torch.zeros(memory.parameter.numel(), device=memory.device) if every else None
    kinds = memory.BUFFERS if every else sorted(memory.buffers)
    return {kind: memory.buffers.get(kind, empty).clone() for kind in kinds}


def restore_state(memories: Mapping[str, ResidualMemory], state: dict, exchange: Exchange) -> int:
    """Fill the memories from a state and return its step; all is checked, on every rank, before anything is changed."""
    sizes = {name: memory.parameter.numel() for name, memory in memories.items()}
    kinds = {name: memory.BUFFERS for name, memory in memories.items()}
    exchange.refuse_together(refused(lambda: check_state(state, sizes, kinds, exchange.size())))
    share = 1.0 / exchange.size() if state["summed"] else 1.0
    for name, memory in memories.items():
        saved = state["memory"][name]
        for kind in memory.BUFFERS:
            if kind in saved and (kind in memory.buffers or bool(saved[kind].any())):
                memory.buffer(kind).copy_(torch.as_tensor(saved[kind])).mul_(share)
            elif kind in memory.buffers:
                memory.buffers[kind].zero_()
    return state["step"]
