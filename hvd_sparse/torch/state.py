"""The checkpoint of a compressor's error feedback, of one rank or summed over all ranks."""

import torch

from hvd_sparse.checkpoint import VERSION, check_state, on_host, refused, share_of
from hvd_sparse.reduce_scatter import restored, state_of
from hvd_sparse.torch.error_feedback import Kept
from hvd_sparse.torch.exchange import Exchange
from hvd_sparse.torch.hierarchical import HierarchicalStep
from hvd_sparse.torch.step import Step


def gather_state(step: Step | HierarchicalStep, number: int, exchange: Exchange, summed: bool) -> dict:
    """Return a state in the layout of `hvd_sparse.checkpoint`; a collective call if summed."""
    if summed:
        exchange.meet("sum")
    memory = {name: _copies(kept, every=summed) for name, kept in sorted(step.kept(summed).items())}
    if summed:
        for name, buffers in memory.items():
            for kind, buffer in buffers.items():
                buffer.copy_(exchange.allreduce(f"state.{name}.{kind}", buffer.double()).wait())
    numbers = {} if summed else {name: threshold.numbers() for name, threshold in sorted(step.thresholds.items())}
    thresholds = {name: torch.tensor(own, dtype=torch.float64) for name, own in numbers.items() if own}
    regions = [] if summed else state_of(step.regions)
    state = {"version": VERSION, "step": number, "summed": summed, **_place(step, exchange)}
    return {**state, "memory": memory, "thresholds": thresholds, "regions": regions}


def _place(step: Step | HierarchicalStep, exchange: Exchange) -> dict[str, int | None]:
    """Return the entries of a state that tell whose it is."""
    return {"ranks": exchange.size(), "rank": exchange.rank(), "shard": step.shard}


def _copies(kept: Kept, every: bool) -> dict[str, torch.Tensor]:
    """Copy the allocated buffers; or with `every`, all buffers as whole tensors, as ranks may have allocated others."""
    own = {} if kept.feedback is None else kept.feedback.buffers
    if not every:
        return {kind: own[kind].clone() for kind in sorted(own)}
    copies = {}
    for kind in kept.buffers:
        copies[kind] = torch.zeros(kept.n, device=None if kept.feedback is None else kept.feedback.device)
        if kind in own:
            copies[kind].narrow(0, kept.begin, own[kind].numel()).copy_(own[kind])
    return copies


def restore_state(step: Step | HierarchicalStep, state: dict, exchange: Exchange) -> int:
    """Restore the error feedback and return the step. The state is checked on all ranks before any change."""
    exchange.refuse_together(refused(lambda: _check(step, state, exchange)))
    for name, kept in step.kept(state["summed"]).items():
        if kept.feedback is not None:
            _fill(kept, state["memory"][name], state["summed"])
    step.restart()
    for name, numbers in state["thresholds"].items():
        step.thresholds[name].restore(numbers.tolist())
    sizes = {name: kept.n for name, kept in step.kept(summed=False).items()}
    step.regions = restored(state.get("regions", []), sizes)
    return state["step"]


def _fill(kept: Kept, saved: dict[str, torch.Tensor], summed: bool) -> None:
    """Set the buffers to this rank's part of the saved ones, or to its share of the sums."""
    feedback = kept.feedback
    size = feedback.parameter.numel()
    for kind in feedback.BUFFERS:
        part = torch.as_tensor(saved[kind]).narrow(0, kept.begin, size) if kind in saved else None
        if part is not None and (kind in feedback.buffers or bool(part.any())):
            own = torch.from_numpy(share_of(on_host(part), kept.place, kept.count)) if summed else part
            feedback.buffer(kind).copy_(own)
        elif kind in feedback.buffers:
            feedback.buffers[kind].zero_()


def _check(step: Step | HierarchicalStep, state: dict, exchange: Exchange) -> None:
    kept = step.kept(bool(state.get("summed")) if isinstance(state, dict) else False)
    sizes = {name: one.n for name, one in kept.items()}
    kinds = {name: one.buffers for name, one in kept.items()}
    counts = {name: len(threshold.numbers()) for name, threshold in step.thresholds.items() if threshold.numbers()}
    check_state(state, sizes, kinds, counts, _place(step, exchange))
