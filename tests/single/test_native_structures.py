"""The structures of ctypes have the layout of those in csrc/numpy that they mirror."""

import ctypes
import re
from pathlib import Path

import pytest

from hvd_sparse import native, native_call, native_rows

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "numpy"
TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}  # others are pointers


def structure_of(module):
    """Return the structure that a module defines."""
    (found,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ctypes.Structure) and value.__module__ == module.__name__
    )
    return found


def fields_in_source(file, name):
    """Return the fields of a structure of C++, as a ctypes structure lists them."""
    body = re.search(rf"^struct {name} {{\n(.*?)^}};", (SOURCES / file).read_text(), re.DOTALL | re.MULTILINE)[1]
    declared = re.findall(r"^  (?:const )?(\w+)(\*?) (\w+);", body, re.MULTILINE)
    return [(field, ctypes.c_void_p if pointer else TYPES[kind]) for kind, pointer, field in declared]


# size and offset of the last field: the numbers that the static_assert below each structure states
@pytest.mark.parametrize(
    ("module", "file", "name", "size", "last"),
    [
        (native_call, "report.h", "HvdSparseForm", 40, 32),
        (native, "ops.cc", "HvdSparseRule", 16, 12),
        (native_rows, "row_ops.cc", "HvdSparseMatrix", 32, 24),
    ],
)
def test_layouts_agree(module, file, name, size, last):
    structure = structure_of(module)
    assert list(structure._fields_) == fields_in_source(file, name)
    assert ctypes.sizeof(structure) == size
    assert getattr(structure, structure._fields_[-1][0]).offset == last
