"""A model as a session saves it: parameters by name, and the buffers of all layers in one vector."""

import zipfile
from collections.abc import Mapping

import numpy as np

from hvd_sparse.parameter_server.layout import ParameterLayout


def flattened(buffers: Mapping[str, np.ndarray] | None) -> np.ndarray:
    """Return the concatenated buffers, float32[n]."""
    return np.concatenate([np.empty(0, np.float32), *(array.reshape(-1) for array in (buffers or {}).values())])


def split_buffers(flat: np.ndarray, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the parts of concatenated buffers, given the number of elements of each; ValueError if it is another."""
    if sum(sizes.values()) != flat.size:
        raise ValueError(f"buffers must have {flat.size} elements, as the first server's; got {sum(sizes.values())}")
    ends = np.cumsum([0, *sizes.values()]).tolist()
    return {name: flat[end - size : end] for (name, size), end in zip(sizes.items(), ends[1:], strict=True)}


def restored(path: str, layout: ParameterLayout, buffers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat parameters and buffers of a file that `save` wrote; `buffers` if the file has none.

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
            raise ValueError(f"restore={path!r} is of another model, with other shapes: {'; '.join(both)}")
        saved = file["buffers"]
        if buffers.size and saved.size not in (0, buffers.size):
            raise ValueError(f"restore={path!r} must have {buffers.size} elements of buffers, got {saved.size}")
        return layout.flatten(arrays), saved if buffers.size and saved.size else buffers
