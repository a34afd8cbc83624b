"""A compressor's memory as a checkpoint, of one rank or summed over all."""

import torch

from hvd_sparse.checkpoint import VERSION, check_state, refused
from hvd_sparse.torch.exchange import Exchange
from hvd_sparse.torch.memory import ResidualMemory
from hvd_sparse.torch.scope import Scope


def gather_state(scope: Scope, step: int, exchange: Exchange, summed: bool) -> dict:
    """Return a state as `hvd_sparse.checkpoint` has it; collective if summed."""
    memory = {name: _copies(scope.memories[name], every=summed) for name in sorted(scope.memories)}
    if summed:
        sums = [
            exchange.allreduce(f"state.{name}.{kind}", buffer)
            for name, buffers in memory.items()
            for kind, buffer in buffers.items()
        ]
        for pending in sums:
            pending.wait()
    kept = {} if summed else {name: threshold.numbers() for name, threshold in sorted(scope.thresholds.items())}
    thresholds = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in kept.items() if numbers}
    state = {"version": VERSION, "step": step, "ranks": exchange.size(), "summed": summed}
    return {**state, "memory": memory, "thresholds": thresholds}


def _copies(memory: ResidualMemory, every: bool) -> dict[str, torch.Tensor]:
    """Copy the buffers that were made, or `every` one: which were made may differ between ranks."""
    empty = torch.zeros(memory.parameter.numel(), device=memory.device) if every else None
    kinds = memory.BUFFERS if every else sorted(memory.buffers)
    return {kind: memory.buffers.get(kind, empty).clone() for kind in kinds}


def restore_state(scope: Scope, state: dict, exchange: Exchange) -> int:
    """Fill the memories from a state and return its step; all is checked, on every rank, before anything is changed."""
    exchange.refuse_together(refused(lambda: _check(scope, state, exchange.size())))
    share = 1.0 / exchange.size() if state["summed"] else 1.0
    for name, memory in scope.memories.items():
        saved = state["memory"][name]
        for kind in memory.BUFFERS:
            if kind in saved and (kind in memory.buffers or bool(saved[kind].any())):
                memory.buffer(kind).copy_(torch.as_tensor(saved[kind])).mul_(share)
            elif kind in memory.buffers:
                memory.buffers[kind].zero_()
    scope.restart()
    for name, numbers in state["thresholds"].items():
        scope.thresholds[name].restore(numbers.tolist())
    return state["step"]


def _check(scope: Scope, state: dict, ranks: int) -> None:
    sizes = {name: memory.parameter.numel() for name, memory in scope.memories.items()}
    kinds = {name: memory.BUFFERS for name, memory in scope.memories.items()}
    counts = {name: len(threshold.numbers()) for name, threshold in scope.thresholds.items() if threshold.numbers()}
    check_state(state, sizes, kinds, counts, ranks)
