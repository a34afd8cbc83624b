"""The text of the character-level examples of both frameworks: the source of Python's standard library."""

import math
import pathlib
import string
import sysconfig

import numpy as np

MODULES = """
argparse ast bdb calendar codecs configparser contextlib copy csv dataclasses difflib dis doctest enum fractions
functools gettext glob gzip heapq inspect mimetypes ntpath optparse os pickle plistlib posixpath pprint pstats random
selectors shlex shutil socket socketserver statistics subprocess tempfile textwrap threading trace traceback types
uuid warnings weakref
"""
CHARACTERS = string.printable
EVALUATION_STREAMS = 64


def load_text():
    """Return the training and the held-out characters (the last tenth) as indices int64[n] into CHARACTERS."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / f"{module}.py").read_text(encoding="utf-8") for module in MODULES.split())
    index = {character: i for i, character in enumerate(CHARACTERS)}
    characters = np.array([index[character] for character in text if character in index], np.int64)
    held_out = len(characters) // 10
    return characters[:-held_out], characters[-held_out:]


def split_streams(characters, streams):
    """Cut the text, an array or a tensor, into `streams` rows of equal length that are read side by side."""
    length = len(characters) // streams
    return characters[: streams * length].reshape(streams, length)


def perplexity(loss):
    """Return the perplexity of a mean loss in nats."""
    return math.exp(loss) if loss < 700 else math.inf
