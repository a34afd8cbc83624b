"""Nested tuples and dicts of tensors: flattened for messages, and rebuilt."""

from typing import Any

Structure = Any  # an int, the leaf's number; a list; a dict; None


def flatten(tree) -> tuple[list, Structure]:
    """Return leaves and structure of nested tuples, lists and dicts; None stays. A list comes back as a tuple.

    TypeError for a dict whose keys are not strings.
    """
    leaves: list = []
    return leaves, _structure(tree, leaves)


def unflatten(leaves: list, structure: Structure):
    """Return the tree that `flatten` took apart, with these leaves."""
    if structure is None:
        return None
    if isinstance(structure, list):
        return tuple(unflatten(leaves, part) for part in structure)
    if isinstance(structure, dict):
        return {key: unflatten(leaves, part) for key, part in structure.items()}
    return leaves[structure]


def check(structure: Structure, leaves: int) -> None:
    """Raise ValueError unless this is the structure of a tree of so many leaves, in the order of `flatten`."""
    found = _numbers(structure)
    if found != list(range(leaves)):
        raise ValueError(f"the structure has leaves {found[:10]}, where there are {leaves} tensors")


def names(structure: Structure, prefix: str = "") -> list[str]:
    """Return the leaves' names: "output" of a single tensor, else the path of keys and numbers, such as "a.1"."""
    if structure is None:
        return []
    if isinstance(structure, int):
        return [prefix or "output"]
    parts = enumerate(structure) if isinstance(structure, list) else structure.items()
    return [name for key, part in parts for name in names(part, f"{prefix}.{key}" if prefix else str(key))]


def module_name(name: str) -> str:
    """Return a leaf's name as a module can have it: without dots."""
    return name.replace(".", "/")


def call(function, tree, **options):
    """Call a stage: the parts of a tuple are its arguments, those of a dict its keyword arguments."""
    if isinstance(tree, (tuple, list)):
        return function(*tree, **options)
    if isinstance(tree, dict):
        return function(**tree, **options)
    return function(tree, **options)


def _numbers(structure: Structure) -> list[int]:
    """Return the leaves' numbers as they stand in a structure; ValueError where it is none."""
    if structure is None:
        return []
    if isinstance(structure, int) and not isinstance(structure, bool):
        return [structure]
    if isinstance(structure, (list, dict)):
        parts = structure if isinstance(structure, list) else structure.values()
        return [number for part in parts for number in _numbers(part)]
    raise ValueError(f"a structure has numbers, lists and dicts, got {type(structure).__name__}")


def _structure(node, leaves: list) -> Structure:
    """Return the structure of a tree, and append its leaves."""
    if node is None:
        return None
    if isinstance(node, (tuple, list)):
        return [_structure(part, leaves) for part in node]
    if isinstance(node, dict):
        wrong = [key for key in node if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"keys of what crosses a boundary must be strings, got {wrong[0]!r}")
        return {key: _structure(part, leaves) for key, part in node.items()}
    leaves.append(node)
    return len(leaves) - 1
