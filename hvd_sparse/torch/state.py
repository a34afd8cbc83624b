"""The checkpoint of a compressor's error feedback, of one rank or summed over all ranks."""

import torch

from hvd_sparse.checkpoint import LARGEST, SPAN, VERSION, as_array, check_state, growth, refused, share_of, with_names
from hvd_sparse.reduce_scatter import restored, state_of
from hvd_sparse.torch.error_feedback import StatePart
from hvd_sparse.torch.exchange import Exchange
from hvd_sparse.torch.optimizer_step import OptimizerStep


def gather_state(step: OptimizerStep, number: int, exchange: Exchange, summed: bool, averages: bool) -> dict:
    """Return a state in the layout of `hvd_sparse.checkpoint`; a collective call if summed."""
    if summed:
        exchange.meet("sum")
    parts = step.state_parts(summed) if summed or step.has_state else {}  # a state of one rank waits for no other
    memory = {name: _copies(part, every=summed) for name, part in sorted(parts.items())}
    if summed:
        for name, buffers in memory.items():
            for kind, buffer in buffers.items():
                for part, span in enumerate(buffer.split(SPAN)):
                    total = exchange.allreduce(f"state.{name}.{kind}.{part}", span.double(), counted=False).wait()
                    span.copy_(total.clamp_(-LARGEST, LARGEST))
    numbers = {} if summed else {name: threshold.numbers() for name, threshold in sorted(step.thresholds.items())}
    thresholds = {name: torch.tensor(own, dtype=torch.float64, device="cpu") for name, own in numbers.items() if own}
    regions = [] if summed else state_of(step.regions)
    state = {"version": VERSION, "method": step.algorithm.name, "step": number, "summed": summed, "averages": averages}
    count = {} if summed else {"buffers": sum(map(len, memory.values()))}
    own = {**_identity(step, exchange), "memory": memory, "thresholds": thresholds, "regions": regions, **count}
    return {**state, **own}


def _identity(step: OptimizerStep, exchange: Exchange) -> dict[str, int | None]:
    """Return the entries of a state that tell whose it is."""
    return {"ranks": exchange.size(), "rank": exchange.rank(), "shard": step.shard}


def _copies(part: StatePart, every: bool) -> dict[str, torch.Tensor]:
    """Copy the allocated buffers; or with `every`, all buffers as whole tensors, as ranks may have allocated others."""
    own = {} if part.feedback is None else part.feedback.buffers
    if not every:
        return {kind: own[kind].clone() for kind in sorted(own)}
    copies = {}
    for kind in part.buffers:
        device = "cpu" if part.feedback is None else part.feedback.device
        copies[kind] = torch.zeros(part.n, dtype=torch.float32, device=device)
        if kind in own:
            copies[kind].narrow(0, part.begin, own[kind].numel()).copy_(own[kind])
    return copies


def restore_state(step: OptimizerStep, state: dict, exchange: Exchange) -> int:
    """Restore the error feedback and return the step. The state is checked on all ranks before any change."""
    exchange.refuse_together(refused(lambda: _check(step, _under_own_names(step, state), exchange)))
    state = _under_own_names(step, state)
    for name, part in step.state_parts(state["summed"]).items():
        if part.feedback is not None:
            _fill(part, state["memory"].get(name, {}), growth(state, exchange.size()) if state["summed"] else None)
    step.reset()
    for name, numbers in state["thresholds"].items():
        step.thresholds[name].restore(numbers.tolist())
    sizes = {name: part.n for name, part in step.state_parts(summed=False).items()}
    step.regions = restored(state.get("regions", []), sizes)
    return state["step"]


def _fill(part: StatePart, saved: dict[str, torch.Tensor], factor: float | None) -> None:
    """Set the buffers to this rank's part of the saved ones, or to its share of the sums, times a factor."""
    feedback = part.feedback
    size = feedback.parameter.numel()
    for kind in feedback.BUFFERS:
        whole = torch.as_tensor(saved[kind], device=feedback.device) if kind in saved else None
        own = None if whole is None else whole.narrow(0, part.begin, size)
        if own is not None and (kind in feedback.buffers or bool(own.any())):
            if factor is not None:
                own = torch.from_numpy(share_of(as_array(own), part.place, part.count, factor))
            feedback.buffer(kind).copy_(own)
        elif kind in feedback.buffers:
            feedback.buffers[kind].zero_()


def _under_own_names(step: OptimizerStep, state: dict) -> dict:
    """Return a state under the names of this model, which may be in DistributedDataParallel or compiled, or was."""
    return with_names(state, _parts_of(step, state), ".")


def _parts_of(step: OptimizerStep, state: dict) -> dict[str, StatePart]:
    return step.state_parts(bool(state.get("summed")) if isinstance(state, dict) else False)


def _check(step: OptimizerStep, state: dict, exchange: Exchange) -> None:
    parts = _parts_of(step, state)
    sizes = {name: one.n for name, one in parts.items()}
    kinds = {name: one.buffers for name, one in parts.items()}
    counts = {name: len(threshold.numbers()) for name, threshold in step.thresholds.items() if threshold.numbers()}
    check_state(state, sizes, kinds, counts, _identity(step, exchange), step.algorithm.name)
