"""The variables of a compressor, by name."""

import contextlib
from collections.abc import Iterable

import tensorflow as tf

DTYPES = (tf.float32, tf.float64, tf.float16, tf.bfloat16)


class Variables:
    """The variables of one compressor, in the order given, which must be that of every rank.

    variables: `tf.Variable`s (Keras 3's are unwrapped); or, for a model that is built late, a function that returns
    them, or anything that has `trainable_variables`, such as the model itself: it is asked when first used.
    """

    def __init__(self, variables):
        self._source = variables
        self._by_name: dict[str, tf.Variable] = {}
        self._name_of: dict[int, str] = {}
        if not _may_come_late(variables):
            self.load()
        else:
            with contextlib.suppress(ValueError):  # Keras: weights have not yet been created
                self.load()

    def load(self) -> None:
        """Ask for the variables, once; ValueError if there are none."""
        if self._by_name:
            return
        for variable in _resolve(self._source):
            variable = _checked(variable)
            if id(variable) in self._name_of:  # a tied weight
                continue
            name = unique_name(_plain_name(variable), self._by_name)
            self._by_name[name] = variable
            self._name_of[id(variable)] = name
        if not self._by_name:
            raise ValueError(
                "variables is empty; pass model.trainable_variables of a model that is built, or the model itself"
            )

    def is_loaded(self) -> bool:
        """Return whether the variables are known."""
        return bool(self._by_name)

    def __getitem__(self, name: str) -> tf.Variable:
        return self._by_name[name]

    def __iter__(self):
        return iter(self._by_name)

    def describe(self) -> list[str]:
        """Return one line a variable, for the comparison between ranks."""
        return [f"{name}: {tuple(v.shape)} {v.dtype.name}" for name, v in self._by_name.items()]

    def name_of(self, variable) -> str:
        """Return the name of a variable, or raise ValueError."""
        variable = _unwrapped(variable)
        if id(variable) not in self._name_of:
            raise ValueError(
                f"the gradient of {getattr(variable, 'name', variable)!r} belongs to none of the {len(self._by_name)} "
                "variables that this compression was built with. Build it from all that the optimizer trains: "
                "Compression.dgc(model.trainable_variables, ...)"
            )
        return self._name_of[id(variable)]


def unique_name(name: str, taken) -> str:
    """Return the name, with a number behind it if it is taken: TensorFlow's names need not be unique."""
    number, result = 1, name
    while result in taken:
        number += 1
        result = f"{name}#{number}"
    return result


def _has_variables(source) -> bool:
    return hasattr(type(source), "trainable_variables")  # asking the object itself may fail while it is not built


def _may_come_late(source) -> bool:
    return _has_variables(source) or callable(source)


def _resolve(source) -> list:
    if isinstance(source, tf.Variable):
        raise TypeError("variables must be a list of variables, got a single one; pass [variable]")
    if _has_variables(source):
        source = source.trainable_variables
    if callable(source):
        source = source()
    if not isinstance(source, Iterable):
        raise TypeError(f"variables must be a list of tf.Variable, got {type(source).__name__}")
    return list(source)


def _unwrapped(variable):
    """Return the tf.Variable inside a variable of Keras 3."""
    inner = getattr(variable, "value", None)
    return inner if not isinstance(variable, tf.Variable) and isinstance(inner, tf.Variable) else variable


def _plain_name(variable: tf.Variable) -> str:
    return variable.name.removesuffix(":0")


def _checked(variable) -> tf.Variable:
    variable = _unwrapped(variable)
    if not isinstance(variable, tf.Variable):
        raise TypeError(f"variables must be tf.Variable, got {type(variable).__name__}")
    if variable.dtype not in DTYPES:
        raise TypeError(
            f"{variable.name}: gradients must be float32, float64, float16 or bfloat16, got {variable.dtype.name}"
        )
    if not variable.shape.is_fully_defined() or 0 in variable.shape:
        raise ValueError(f"{variable.name} must have a known shape without zeros, got {variable.shape}")
    return variable
