"""A compressor's error feedback as a checkpoint, of one rank or summed over all."""

import torch

from hvd_sparse.checkpoint import VERSION, check_state, refused
from hvd_sparse.reduce_scatter import restored, state_of
from hvd_sparse.torch.error_feedback import ErrorFeedback
from hvd_sparse.torch.exchange import Exchange
from hvd_sparse.torch.step import Step


def gather_state(step: Step, number: int, exchange: Exchange, summed: bool) -> dict:
    """Return a state as `hvd_sparse.checkpoint` has it; collective if summed."""
    memory = {name: _copies(step.feedback[name], every=summed) for name in sorted(step.feedback)}
    if summed:
        sums = [
            exchange.allreduce(f"state.{name}.{kind}", buffer)
            for name, buffers in memory.items()
            for kind, buffer in buffers.items()
        ]
        for pending in sums:
            pending.wait()
    kept = {} if summed else {name: threshold.numbers() for name, threshold in sorted(step.codec.thresholds.items())}
    thresholds = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in kept.items() if numbers}
    state = {"version": VERSION, "step": number, "ranks": exchange.size(), "summed": summed}
    regions = [] if summed else state_of(step.codec.regions)
    return {**state, "memory": memory, "thresholds": thresholds, "regions": regions}


def _copies(feedback: ErrorFeedback, every: bool) -> dict[str, torch.Tensor]:
    """Copy the buffers that were made, or `every` one: which were made may differ between ranks."""
    empty = torch.zeros(feedback.parameter.numel(), device=feedback.device) if every else None
    kinds = feedback.BUFFERS if every else sorted(feedback.buffers)
    return {kind: feedback.buffers.get(kind, empty).clone() for kind in kinds}


def restore_state(step: Step, state: dict, exchange: Exchange) -> int:
    """Fill the memories from a state and return its step; all is checked, on every rank, before anything is changed."""
    exchange.refuse_together(refused(lambda: _check(step, state, exchange.size())))
    share = 1.0 / exchange.size() if state["summed"] else 1.0
    for name, feedback in step.feedback.items():
        saved = state["memory"][name]
        for kind in feedback.BUFFERS:
            if kind in saved and (kind in feedback.buffers or bool(saved[kind].any())):
                feedback.buffer(kind).copy_(torch.as_tensor(saved[kind])).mul_(share)
            elif kind in feedback.buffers:
                feedback.buffers[kind].zero_()
    step.restart()
    for name, numbers in state["thresholds"].items():
        step.codec.thresholds[name].restore(numbers.tolist())
    sizes = {name: feedback.parameter.numel() for name, feedback in step.feedback.items()}
    step.codec.regions = restored(state.get("regions", []), sizes, exchange.rank())
    return state["step"]


def _check(step: Step, state: dict, ranks: int) -> None:
    sizes = {name: feedback.parameter.numel() for name, feedback in step.feedback.items()}
    kinds = {name: feedback.BUFFERS for name, feedback in step.feedback.items()}
    counts = {
        name: len(threshold.numbers()) for name, threshold in step.codec.thresholds.items() if threshold.numbers()
    }
    check_state(state, sizes, kinds, counts, ranks)
