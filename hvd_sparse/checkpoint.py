"""Checkpoints of a compressor: their layout, the same for both frameworks, and their validation.

{"version": int, "method": str, "step": int, "ranks": int, "rank": int, "shard": int or None, "summed": bool,
 "averages": bool, "memory": {parameter: {buffer: float32[n]}}, "thresholds": {name: float64[numbers]},
 "regions": [(parameters of a message, bounds), ...], "buffers": int}

"method" is the method's name: the residual of one may be worth more in another. Rank and shard, of a hierarchical
exchange, tell whose state it is. Older states lack these three. "buffers" is the number of buffers in a state of one
rank that PyTorch's compressor has saved: it allocates them only as gradients come.

Thresholds are those that persist across steps, one per parameter or one for the "model". A summed state has none, as a
threshold belongs to one rank's residual; it is computed again for a share of the sum. The same holds for the regions of
a reduce-scatter (`hvd_sparse.reduce_scatter`), which older states lack.

Sums are computed in float64, clamped to the range of float32 and rounded once, so that world size and order do not
matter. The shares of a sum add up to it exactly; or to M / N of it where N ranks saved it, M load it, and "averages"
tells that the optimizer averages over ranks (op=Average; older states do not tell, and mean it): residuals then change
the weights by their mean, which stays the same.
"""

import contextlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from hvd_sparse.checks import checked_integer, some_ranks

VERSION = 2
SPAN = 1 << 20  # elements that are summed, or shared out, at a time: float64 needs several arrays for them
LARGEST = float(np.finfo(np.float32).max)


def check_state(
    state: dict,
    sizes: Mapping[str, int],
    kinds: Mapping[str, tuple[str, ...]],
    thresholds: Mapping[str, int],
    identity: Mapping[str, int | None],
    method: str,
) -> None:
    """Raise ValueError unless a state fits a method, parameters of these sizes and, unless summed, this rank.

    thresholds: the count of numbers of each threshold. identity: this process's "ranks", "rank" and "shard".
    """
    if not isinstance(state, dict) or state.get("version") != VERSION:
        found = f"version {state.get('version')}" if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"the state must be what state_dict() returned, of version {VERSION}, got {found}")
    missing = [key for key in ("step", "ranks", "summed", "memory", "thresholds") if key not in state]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}: it must be what state_dict() returned")
    checked_integer("the state's step", state["step"], 0)
    if state.get("method", method) != method:
        raise ValueError(f"the state is of another method: {state['method']} there, {method} here")
    if not state["memory"]:
        return  # saved before the first step of a hierarchical exchange
    _check_names(set(state["memory"]), set(sizes))
    for name, size in sizes.items():
        _check_buffers(name, state["memory"][name], size, kinds[name])
    count = sum(map(len, state["memory"].values()))
    if count < state.get("buffers", 0):
        raise ValueError(
            f"the state has {count} buffers, and had {state['buffers']} when saved: torch.distributed.checkpoint "
            "restores only what the state given to it has. Save and load state_dict(summed=True) instead"
        )
    found = {name: as_array(numbers) for name, numbers in state["thresholds"].items()}
    expected = {} if state["summed"] else dict(thresholds)
    if {name: numbers.size for name, numbers in found.items()} != expected:
        raise ValueError("the state belongs to another method or other parameters: it has other thresholds")
    for name, numbers in found.items():
        if not np.isfinite(numbers).all():
            raise ValueError(f"{name}: the state's threshold must be finite, got {numbers.tolist()}")
    if state["summed"]:
        return
    if state["ranks"] != identity["ranks"]:
        raise ValueError(
            f"the state is that of one of {state['ranks']} ranks, and there are {identity['ranks']} now: save "
            "state_dict(summed=True) instead, and every rank takes its share of it"
        )
    for key in ("rank", "shard"):
        if state.get(key, identity[key]) != identity[key]:
            raise ValueError(
                f"the state is that of {key} {state[key]}, and this is {key} {identity[key]}: every rank loads what it "
                "saved itself, or all ranks load one state_dict(summed=True)"
            )


def _check_names(saved: set[str], own: set[str]) -> None:
    sides = (("the state", saved - own), ("this compressor", own - saved))
    only = [f"only {side} has {', '.join(sorted(names)[:5])}" for side, names in sides if names]
    if only:
        raise ValueError(f"the state belongs to other parameters: {'; '.join(only)}")


def _check_buffers(name: str, saved: Mapping, size: int, kinds: tuple[str, ...]) -> None:
    for kind, buffer in saved.items():
        if kind not in kinds:
            raise ValueError(
                f"the state belongs to another method: it has a {kind} for {name}, which this method does not keep"
            )
        if tuple(getattr(buffer, "shape", ())) != (size,):
            raise ValueError(f"{name}: the state's {kind} must have {size} elements")
        if not np.isfinite(as_array(buffer)).all():
            raise ValueError(
                f"{name}: the state's {kind} must be finite, got NaN or infinity. Load a checkpoint from before "
                "training diverged"
            )


def with_names(state, names: Iterable[str], separator: str = "/"):
    """Return a state under these names if its own differ from them only in the first parts of their paths.

    In Keras 3, the variables of a new Sequential model are "sequential/dense/kernel", and "dense/kernel" once the model
    has been saved and loaded. In PyTorch, the names of a model in DistributedDataParallel begin with "module.", those
    of a compiled one with "_orig_mod.". Any other state is returned as it is.
    """
    memory = state.get("memory") if isinstance(state, dict) else None
    own = list(names)
    if not isinstance(memory, Mapping) or not memory or len(memory) != len(own) or set(memory) == set(own):
        return state
    new = _with_one_beginning(list(memory), own, separator) or _with_own_ends(list(memory), own, separator)
    if len(set(new.values())) != len(own):
        return state
    thresholds = {new.get(name, name): numbers for name, numbers in state.get("thresholds", {}).items()}
    renamed = {"memory": {new[name]: buffers for name, buffers in memory.items()}, "thresholds": thresholds}
    regions = [([new[name] for name in joint], bounds) for joint, bounds in state.get("regions", [])]
    return {**state, **renamed, "regions": regions}


def _with_one_beginning(saved: list[str], own: list[str], separator: str) -> dict[str, str]:
    """Return {saved name: own name} if all names on one side are those of the other behind one path; else nothing."""
    extra = max(map(len, saved)) - max(map(len, own))
    longer, shorter = (saved, own) if extra > 0 else (own, saved)
    path = max(longer, key=len)[: abs(extra)]
    if not path.endswith(separator) or {path + name for name in shorter} != set(longer):
        return {}
    return {name: name[extra:] if extra > 0 else path + name for name in saved}


def _with_own_ends(saved: list[str], own: list[str], separator: str) -> dict[str, str]:
    """Return {saved name: own name} of those that each are, or have, the end of exactly one; else nothing."""
    theirs, ours = set(saved), set(own)
    found = {name: ours.intersection(_ends(name, separator)) for name in saved}
    for name in own:
        for end in theirs.intersection(_ends(name, separator)):
            found[end].add(name)
    return {name: others.pop() for name, others in found.items() if len(others) == 1}


def _ends(path: str, separator: str) -> list[str]:
    parts = path.split(separator)
    return [separator.join(parts[begin:]) for begin in range(len(parts))]


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` once it is complete: `with atomic_file(path) as file`.

    If the process is killed at any time, `path` is the complete old file or the complete new one. The new file is
    written next to the old one, under a temporary name that begins with a dot, and reaches the disk before it is
    renamed. A killed process leaves this temporary file.

    Args:
        path: Path of the file; its folder must exist.

    Yields:
        A binary file, for `torch.save(state, file)` or `numpy.savez(file, **arrays)`.

    Raises:
        OSError: The file cannot be written. After this or another error in the block, `path` is unchanged.
    """
    folder, name = os.path.split(os.path.abspath(path))
    descriptor, partial = tempfile.mkstemp(prefix=f".{name}.", suffix=".partial", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, _permissions(path))
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    entry = os.open(folder, os.O_RDONLY)  # the folder's own entry must reach the disk too
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


def _permissions(path: str | os.PathLike) -> int:
    """Return the mode of an existing file, or the mode with which `open` would create it."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def save_state(path: str | os.PathLike, state: Any) -> None:
    """Write the state of a TensorFlow compressor to a file, which replaces `path` once it is complete (`atomic_file`).

    The file is in NumPy's .npz format, whatever the ending of its name: arrays as arrays, the rest as JSON. It has no
    pickles. For PyTorch's compressors use `torch.save(state, file)` and `torch.load(path, weights_only=True)`.

    Args:
        path: Path of the file; its folder must exist.
        state: What `state_dict()` returned, alone or as a part of what else your job saves: None, bools, numbers,
            strings and NumPy arrays of these, in lists, tuples and dicts, nested as you like.

    Raises:
        TypeError: The state has something else, such as a tensor, a variable or an array of objects; `path` is
            unchanged.
        OSError: The file cannot be written; `path` is unchanged.
    """
    arrays: dict[str, Any] = {}
    structure = json.dumps(_described(state, "state", arrays))
    with atomic_file(path) as file:
        np.savez(file, state=np.array(structure), **arrays)


def load_state(path: str | os.PathLike) -> Any:
    """Read a file of `save_state`. Nothing in the file is executed.

    Args:
        path: Path of the file.

    Returns:
        The state, for `load_state_dict`: equal in all values, types, dtypes and shapes to the one that was saved.

    Raises:
        ValueError: The file is damaged, or `save_state` has not written it.
        OSError: The file cannot be opened.
    """
    with open(path, "rb") as file:
        try:
            return _read(file)
        except MemoryError:
            raise
        except Exception as error:  # of zipfile, zlib, json or NumPy
            reason = str(error) or type(error).__name__
            raise ValueError(f"{os.fspath(path)!r} is damaged, or not a file of save_state: {reason}") from error


def _described(value: Any, place: str, arrays: dict[str, Any]) -> Any:
    """Return a part of a state as JSON, with the names of its arrays, which are added to `arrays`."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_described(item, f"{place}[{number}]", arrays) for number, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": _described(list(value), place, arrays)}
    if kind is dict:
        items = [(key, f"{place}[{key!r}]", item) for key, item in value.items()]
        return {"dict": [[_described(key, at, arrays), _described(item, at, arrays)] for key, at, item in items]}
    if kind is np.ndarray or isinstance(value, np.generic):
        dtype = value.dtype
        if dtype.kind in "biufcSU" and dtype.isbuiltin != 2:  # 2: of another library, such as bfloat16
            name = f"array.{len(arrays)}"
            arrays[name] = np.asarray(value)
            return {"array" if kind is np.ndarray else "scalar": name}
    found = f"an array of {value.dtype}" if isinstance(value, np.ndarray | np.generic) else f"a {kind.__name__}"
    raise TypeError(
        f"{place} is {found}: save_state writes None, bools, numbers, strings, NumPy arrays of these, lists, tuples "
        "and dicts. Use torch.save for states of PyTorch"
    )


def _read(file: BinaryIO) -> Any:
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()  # before any part of it is interpreted
        if damaged:
            raise ValueError(f"the checksum of its part {damaged} is wrong")
        return _rebuilt(json.loads(str(_array(archive, "state"))), archive)


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    if f"{name}.npy" not in archive.namelist():
        raise ValueError(f"it has no array {name!r}")
    with archive.open(f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _rebuilt(node: Any, archive: zipfile.ZipFile) -> Any:
    """Return the part of a state that `_described` has described."""
    if isinstance(node, list):
        return [_rebuilt(item, archive) for item in node]
    if not isinstance(node, dict):
        return node
    [(kind, content)] = node.items()
    if kind == "tuple":
        return tuple(_rebuilt(content, archive))
    if kind == "dict":
        return {_rebuilt(key, archive): _rebuilt(item, archive) for key, item in content}
    if kind in ("array", "scalar"):
        array = _array(archive, content)
        return array if kind == "array" else array[()]
    raise ValueError(f"its JSON has a {kind!r}")


def growth(state: Mapping, world_size: int) -> float:
    """Return the factor of a summed state's sums on this number of ranks."""
    return world_size / state["ranks"] if state.get("averages", True) else 1.0


def share_of(total: np.ndarray, place: int, count: int, factor: float = 1.0) -> np.ndarray:
    """Return the share of rank `place` of `count` in a sum, float32[n], times a factor, within the range of float32.

    In float64, the shares add up to it exactly: each is a multiple of the last bit of the sum, and the first rank's
    share includes the rounding error.
    """
    total = np.asarray(total, np.float32)
    share = np.empty_like(total)
    for begin in range(0, total.size, SPAN):
        part = total[begin : begin + SPAN]
        if factor != 1.0:
            part = np.clip(part * np.float64(factor), -LARGEST, LARGEST).astype(np.float32)
        _fill_share(share[begin : begin + SPAN], part, place, count)
    return share


def _fill_share(share: np.ndarray, total: np.ndarray, place: int, count: int) -> None:
    mantissa, exponent = np.frexp(total.astype(np.float64))
    even = np.ldexp(np.rint(mantissa * 2.0**24 / count), exponent - 24).astype(np.float32)
    share[:] = even if place > 0 else total.astype(np.float64) - (count - 1.0) * even.astype(np.float64)


def as_array(saved) -> np.ndarray:
    """Return a saved buffer, of any framework and on any device, as a NumPy array."""
    return np.asarray(saved.cpu() if hasattr(saved, "cpu") else saved)


def refused(check: Callable[[], None]) -> str:
    """Return why a check of a state fails, to report it to all ranks; an empty string if it succeeds."""
    try:
        check()
    except (ValueError, TypeError, AttributeError) as error:
        return str(error) or type(error).__name__
    return ""


def refusal(reasons: Sequence[str]) -> str:
    """Return the error message of all ranks if any cannot load its state; an empty string if all can."""
    groups: dict[str, list[int]] = {}
    for rank, reason in enumerate(reasons):
        if reason:
            groups.setdefault(reason, []).append(rank)
    return "; ".join(f"{some_ranks(ranks)}: {reason}" for reason, ranks in groups.items())
