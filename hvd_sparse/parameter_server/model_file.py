"""A model as a session saves it: parameters by name, and the buffers of all layers in one vector."""

import json
import zipfile
from collections.abc import Mapping

import numpy as np

from hvd_sparse.checkpoint import atomic_file
from hvd_sparse.parameter_server.layout import RENAMED, ParameterLayout, is_renamed


def flattened(buffers: Mapping[str, np.ndarray] | None) -> np.ndarray:
    """Return the concatenated buffers, float32[n]."""
    return np.concatenate([np.empty(0, np.float32), *(array.reshape(-1) for array in (buffers or {}).values())])


def other_buffers(flat: np.ndarray, own: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return those of concatenated buffers that differ from this rank's, float32[n]; ValueError if sizes differ."""
    ends = np.cumsum([0, *(array.size for array in own.values())]).tolist()
    if ends[-1] != flat.size:
        raise ValueError(f"buffers must have {flat.size} elements, as the first server's; got {ends[-1]}")
    parts = {name: flat[begin:end] for name, begin, end in zip(own, ends[:-1], ends[1:], strict=True)}
    return {name: part for name, part in parts.items() if not np.array_equal(own[name].reshape(-1), part)}


def write_model(path: str, parameters: Mapping[str, np.ndarray], buffers: np.ndarray, settings: dict) -> None:
    """Write parameters, the buffers of all layers, float32[n], and settings as JSON to a file that `restored` reads."""
    arrays = {f"parameter/{name}": array for name, array in parameters.items()}
    with atomic_file(path) as file:
        np.savez(file, buffers=buffers, settings=np.array(json.dumps(settings)), **arrays)


def restored(path: str, layout: ParameterLayout, buffers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat parameters and buffers of a file that `write_model` wrote; `buffers` if the file has none.

    Raises ValueError if the model differs.
    """
    try:
        opened = np.load(path, allow_pickle=False)
        if "buffers" not in getattr(opened, "files", ()):
            raise ValueError("it has other arrays")
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"restore={path!r} is no file of session.save") from error
    with opened as file:
        arrays = {name.removeprefix("parameter/"): file[name] for name in file.files if name.startswith("parameter/")}
        found = {name: np.shape(array) for name, array in arrays.items()}
        differing = {name for name in {*found, *layout.names} if found.get(name) != layout.shapes.get(name)}
        if differing:
            both = [f"{name}: {found.get(name)} there, {layout.shapes.get(name)} here" for name in sorted(differing)]
            what = RENAMED if is_renamed(found, layout.shapes) else "other shapes"
            raise ValueError(f"restore={path!r} is of another model, with {what}: {'; '.join(both)}")
        saved = file["buffers"]
        if buffers.size and saved.size not in (0, buffers.size):
            raise ValueError(f"restore={path!r} must have {buffers.size} elements of buffers, got {saved.size}")
        return layout.flatten(arrays), saved if buffers.size and saved.size else buffers
