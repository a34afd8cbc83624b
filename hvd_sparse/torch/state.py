"""A compressor's memory as a checkpoint, of one rank or summed over all."""

from collections.abc import Mapping

import torch

from hvd_sparse.torch.exchange import Exchange
from hvd_sparse.torch.memory import ResidualMemory
from hvd_sparse.wire import checked_integer

VERSION = 1


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
    empty = torch.zeros(memory.parameter.numel()) if every else None
    kinds = memory.BUFFERS if every else sorted(memory.buffers)
    return {kind: memory.buffers.get(kind, empty).clone() for kind in kinds}


def restore_state(memories: Mapping[str, ResidualMemory], state: dict, exchange: Exchange) -> int:
    """Fill the memories from a state and return its step; all is checked before anything is changed."""
    _check(memories, state, exchange)
    share = 1.0 / exchange.size() if state["summed"] else 1.0
    for name, memory in memories.items():
        saved = state["memory"][name]
        for kind in memory.BUFFERS:
            if kind in saved and (kind in memory.buffers or bool(saved[kind].any())):
                memory.buffer(kind).copy_(saved[kind]).mul_(share)
            elif kind in memory.buffers:
                memory.buffers[kind].zero_()
    return state["step"]


def _check(memories: Mapping[str, ResidualMemory], state: dict, exchange: Exchange) -> None:
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise ValueError(f"this is no state of version {VERSION} from state_dict()")
    missing = [key for key in ("step", "ranks", "summed", "memory") if key not in state]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}: it must be what state_dict() returned")
    checked_integer("the state's step", state["step"], 0)
    if set(state["memory"]) != set(memories):
        names = sorted(set(state["memory"]) ^ set(memories))
        raise ValueError(f"the state belongs to other parameters; only one side has {', '.join(names[:5])}")
    for name, memory in memories.items():
        for kind, saved in state["memory"][name].items():
            if kind not in memory.BUFFERS:
                raise ValueError(f"the state belongs to another method: {name} has a {kind} there")
            if not isinstance(saved, torch.Tensor) or saved.shape != (memory.parameter.numel(),):
                raise ValueError(f"{name}: the state's {kind} must have {memory.parameter.numel()} elements")
    if not state["summed"] and state["ranks"] != exchange.size():
        raise ValueError(
            f"the state is that of one of {state['ranks']} ranks, and there are {exchange.size()} now: save "
            "state_dict(summed=True) instead, and every rank takes its share of it"
        )
