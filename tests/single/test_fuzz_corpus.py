"""The corpus of the payload fuzzer is the output of its script, and is small."""

import importlib.util
import pathlib
import struct

NATIVE = pathlib.Path(__file__).parents[1] / "native"


def script():
    found = importlib.util.spec_from_file_location("make_corpus", NATIVE / "make_corpus.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_corpus_is_what_its_script_makes():
    made = dict(script().inputs())
    assert {path.name: path.read_bytes() for path in (NATIVE / "corpus").iterdir()} == made
    assert sum(map(len, made.values())) < 10_000


def test_every_coding_and_type_is_in_it():
    module = script()
    seen = {tuple(data[1:3]) for data in dict(module.inputs()).values()}
    assert len(seen) == len(module.CODINGS) * len(module.DTYPES)


def test_a_format_by_hand():
    data = script().format_bytes(70_000, 3, "elias_fano", "int1", [(0, 7), (300, 2)], flags=3, ranks=2)
    assert data == bytes([3, 2, 6, 2]) + (69_999).to_bytes(3, "little") + b"\3\0\0\1" + struct.pack("<4H", 0, 7, 300, 2)
