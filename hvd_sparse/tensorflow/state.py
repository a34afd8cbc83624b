"""The checkpoint of a compressor's error feedback, of one rank or summed over all: NumPy arrays in plain dicts.

The twin of `hvd_sparse.torch.state`, with the same layout. Here, all buffers exist from the start, so the set of
buffers in a checkpoint is fixed.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from hvd_sparse.checkpoint import LARGEST, SPAN, VERSION, as_array, check_state, growth, refused, share_of, with_names
from hvd_sparse.reduce_scatter import restored, state_of


def gather_state(compressor, rows: Mapping[str, int], exchange, summed: bool, averages: bool, session) -> dict:
    """Return a state in the layout of `hvd_sparse.checkpoint`; a collective call if summed. rows: of the thresholds."""
    keys = [(name, kind) for name, memory in compressor.feedback.items() for kind in memory.buffers]
    buffers = [compressor.feedback[name].buffers[kind] for name, kind in keys]
    if summed and exchange.is_used():
        check_open(session)
        exchange.meet("sum", "", session)
        buffers = [
            _sum(exchange, f"state.{name}.{kind}", _whole(compressor.hosts, name, buffer.read_value()))
            for (name, kind), buffer in zip(keys, buffers, strict=True)
        ]
    step, *values = evaluate([compressor.step, *compressor.thresholds, *buffers], session)
    kept, values = values[: len(compressor.thresholds)], values[len(compressor.thresholds) :]
    memory: dict[str, dict] = {name: {} for name in compressor.feedback}
    for (name, kind), value in zip(keys, values, strict=True):
        memory[name][kind] = value
    thresholds = {} if summed else {name: np.array([numbers[row] for numbers in kept]) for name, row in rows.items()}
    own = {"summed": summed, "averages": averages, **identity_of(compressor.hosts, exchange)}
    state = {"version": VERSION, "method": compressor.algorithm.name, "step": int(step), **own}
    regions = [] if summed else state_of(compressor.regions)
    return {**state, "memory": memory, "thresholds": thresholds, "regions": regions}


def restore_state(compressor, rows: Mapping[str, int], state: dict, exchange, session) -> None:
    """Restore the buffers and the step. The state is checked on all ranks before any change."""
    check_open(session)
    feedback = compressor.feedback
    state = with_names(state, feedback)
    thresholds = dict.fromkeys(rows, len(compressor.thresholds))
    check = refused(lambda: _check(compressor, thresholds, state, exchange))
    exchange.refuse_together(check, session)
    assign_all(_changes(compressor, rows, state, exchange), session)
    sizes = {name: memory.size for name, memory in feedback.items()}
    compressor.regions.clear()
    compressor.regions.update(restored(state.get("regions", []), sizes))


def _changes(compressor, rows: Mapping[str, int], state: dict, exchange) -> Iterator[tuple[tf.Variable, np.ndarray]]:
    """Yield each variable with its value in a state, one after the other: all of them may be larger than the model."""
    hosts, summed = compressor.hosts, state["summed"]
    yield compressor.step, state["step"]
    for name, memory in compressor.feedback.items():
        saved = state["memory"].get(name, {})
        for kind, buffer in memory.buffers.items():
            value, place, count = np.zeros(memory.size), exchange.rank(), exchange.size()
            if kind in saved:
                value = as_array(saved[kind])
            if summed and hosts is not None and name in hosts.cuts:
                value, place, count = value[slice(*hosts.bounds(name))], hosts.host_number, hosts.host_count
            factor = growth(state, exchange.size()) if summed else 1.0
            yield buffer, share_of(value, place, count, factor) if summed else value.astype(np.float32)
    for number, variable in enumerate(compressor.thresholds):
        values = np.zeros(variable.shape, np.float64)
        for name, numbers in state["thresholds"].items():
            values[rows[name]] = as_array(numbers)[number]
        yield variable, values


def identity_of(hosts, exchange) -> dict[str, int | None]:
    """Return the entries of a state that tell whose it is."""
    return {
        "ranks": exchange.size(),
        "rank": exchange.rank(),
        "shard": None if hosts is None else hosts.shard,
    }


def _sum(exchange, name: str, buffer: tf.Tensor) -> tf.Tensor:
    """Return the sum over all ranks of float32[n], computed in float64, clamped to float32 and rounded once."""
    spans = [buffer[begin : begin + SPAN] for begin in range(0, max(1, buffer.shape[0]), SPAN)]
    sums = []
    for number, span in enumerate(spans):
        total = exchange.allreduce(f"{name}.{number}", tf.cast(span, tf.float64))
        sums.append(tf.cast(tf.clip_by_value(total, -LARGEST, LARGEST), tf.float32))
    return tf.concat(sums, 0)


def _whole(hosts, name: str, shard: tf.Tensor) -> tf.Tensor:
    """Pad a buffer of this rank's shard with zeros to the size of the whole variable."""
    if hosts is None or name not in hosts.cuts:
        return shard
    begin, end = hosts.bounds(name)
    return tf.pad(shard, [[begin, int(hosts.cuts[name][-1]) - end]])


def _check(compressor, thresholds: Mapping[str, int], state: dict, exchange) -> None:
    """Raise ValueError unless a state fits the error feedback and the thresholds."""
    feedback, hosts = compressor.feedback, compressor.hosts
    sizes, kinds = {n: m.size for n, m in feedback.items()}, {n: m.BUFFERS for n, m in feedback.items()}
    if hosts is not None and isinstance(state, dict) and state.get("summed"):
        sizes |= {name: int(cut[-1]) for name, cut in hosts.cuts.items()}
    identity, method = identity_of(compressor.hosts, exchange), compressor.algorithm.name
    check_state(state, sizes, kinds, thresholds, identity, method)
    for name, memory in feedback.items():
        for kind, saved in state["memory"].get(name, {}).items():
            if kind not in memory.buffers and np.any(as_array(saved)):
                raise ValueError(
                    f"{name}: the state has a {kind} that would be lost, as the variable is sent dense now: give the "
                    "compression the min_numel and the dense that it had"
                )


def check_open(session) -> None:
    """Raise RuntimeError inside a tf.function, or if operations cannot be added to a session's graph."""
    _refuse_tracing()
    if session is not None and session.graph.finalized:
        raise RuntimeError(
            "hvd_sparse: the graph of this session is finalized, so no state of a compressor can be loaded or summed. "
            "In a MonitoredTrainingSession, let a Scaffold save and restore it: see docs/tensorflow.md"
        )


def evaluate(values: list, session) -> list:
    """Return copies of the values of variables and tensors, eagerly or through a session."""
    if tf.executing_eagerly():
        return [np.array(value.numpy()) for value in values]
    _refuse_tracing()
    check_session(session)
    return _run_alone(session, values)


def assign_all(changes: Iterable[tuple[tf.Variable, np.ndarray]], session) -> None:
    """Set variables of `make_variable` to values, eagerly or through a session, whose graph does not grow by this."""
    _refuse_tracing()
    if tf.executing_eagerly():
        for variable, value in changes:
            variable.assign(value)
        return
    check_session(session)
    starts = [(variable.initializer, value) for variable, value in changes]  # an operation's inputs: variable, value
    _run_alone(session, [start for start, _ in starts], {start.inputs[1]: value for start, value in starts})


def _run_alone(session, *what):
    """Run operations in a session without the hooks of a monitored one: what these add may take a training step."""
    if not hasattr(session, "run_step_fn"):
        return session.run(*what)
    return session.run_step_fn(lambda step_context: step_context.session.run(*what))


def check_session(session) -> None:
    """Raise ValueError without a session."""
    if session is None:
        raise ValueError("hvd_sparse: a graph of TensorFlow 1 is read through a session; pass session=...")


def _refuse_tracing() -> None:
    if tf.compat.v1.executing_eagerly_outside_functions() and not tf.executing_eagerly():
        raise RuntimeError(
            "hvd_sparse: a tf.function cannot read or change the state of a compressor: call stats(), state_dict(), "
            "load_state_dict() and reset() between steps, outside it. In a step, log with log_to(); in fit, also with "
            "hvd_sparse.tensorflow.keras.LogCompression"
        )
