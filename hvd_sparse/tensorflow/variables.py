"""The variables of a compressor or a session, by name."""

import contextlib
from collections.abc import Iterable, Mapping

import tensorflow as tf

DTYPES = (tf.float32, tf.float64, tf.float16, tf.bfloat16)


class Variables:
    """The variables of one compressor, in the given order, which must be the same on every rank.

    variables: a list of `tf.Variable` (variables of Keras 3 are unwrapped). For a model that is built later: a function
    that returns the list, or an object with `trainable_variables`, such as the model. A model that is not built is read
    at first use: until then, some layers may have variables and others none.
    """

    def __init__(self, variables):
        self._source = variables
        self._by_name: dict[str, tf.Variable] = {}
        self._name_of: dict[int, str] = {}
        if not _may_come_late(variables):
            self.load()
        elif not (has_variables(variables) and getattr(variables, "built", True) is False):
            with contextlib.suppress(ValueError):  # Keras: weights have not yet been created
                self.load()

    def load(self) -> None:
        """Read the variables, once; raise ValueError if there are none."""
        if self._by_name:
            return
        by_name, name_of = {}, {}
        for variable in resolve(self._source):
            if is_frozen_for_ever(variable):
                continue
            variable = checked(variable)
            if id(variable) in name_of:  # a tied weight
                continue
            name = unique_name(plain_name(variable), by_name)
            by_name[name], name_of[id(variable)] = variable, name
        self._by_name, self._name_of = by_name, name_of
        if not self._by_name:
            raise ValueError(
                "parameters is empty; pass model.trainable_variables of a model that is built, or the model itself"
            )

    def is_loaded(self) -> bool:
        """Return whether the variables are known."""
        return bool(self._by_name)

    def __getitem__(self, name: str) -> tf.Variable:
        return self._by_name[name]

    def __iter__(self):
        return iter(self._by_name)

    def describe(self) -> list[str]:
        """Return one line for each variable, for the configuration check across ranks."""
        return [f"{name}: {tuple(v.shape)} {v.dtype.name}" for name, v in self._by_name.items()]

    def names_of(self, variables: Iterable) -> set[str]:
        """Return the names of those of some variables that are among these."""
        found = (self._name_of.get(id(unwrapped(variable))) for variable in variables)
        return {name for name in found if name is not None}

    def name_of(self, variable) -> str:
        """Return the name of a variable, or raise ValueError."""
        variable = unwrapped(variable)
        if id(variable) not in self._name_of:
            raise ValueError(
                f"the gradient of {getattr(variable, 'name', variable)!r} belongs to none of the {len(self._by_name)} "
                "variables that this compressor was built with. Build it from all that the optimizer trains: "
                "Compression.dgc(model.trainable_variables, ...). If the variable was frozen then, build another "
                "compression after it is unfrozen, or name all variables that will train from the start"
            )
        return self._name_of[id(variable)]


def unique_name(name: str, taken) -> str:
    """Return the name, with a number appended if it is in `taken`, as TensorFlow's names need not be unique."""
    number, result = 1, name
    while result in taken:
        number += 1
        result = f"{name}#{number}"
    return result


def trained_and_buffers(source) -> tuple[dict[str, tf.Variable], dict[str, tf.Variable]]:
    """Return {name: variable} of the trained variables and of a model's buffers, in model order, with unique names.

    source: as for `Variables`. Names are paths (Keras 3) if there are any, else variable names, numbered where they
    are not unique. Buffers are floating-point variables that are not trained, except those of frozen layers. Raises
    ValueError if no variable is trained.
    """
    variables = [variable for variable in resolve(source, "model") if getattr(variable, "trainable", True)]
    trained = _named(variables, {})
    if not trained:
        raise ValueError(
            "there must be variables to train, got none: build the model first, with an Input or by a call on a batch"
        )
    if not has_variables(source):
        return trained, {}
    layers = getattr(source, "_flatten_layers", list)()
    frozen = {id(unwrapped(weight)) for layer in layers if not layer.trainable for weight in layer.weights}
    name = "non_trainable_weights" if hasattr(source, "non_trainable_weights") else "non_trainable_variables"
    others = [variable for variable in getattr(source, name) if id(unwrapped(variable)) not in frozen]
    return trained, _named([variable for variable in others if unwrapped(variable).dtype.is_floating], trained)


def frozen_variables(source, others: dict[str, tf.Variable]) -> list[tf.Variable]:
    """Return the floating-point variables that are not among the others, which change; source: as above."""
    known = {id(variable) for variable in others.values()}
    name = "non_trainable_weights" if hasattr(source, "non_trainable_weights") else "non_trainable_variables"
    variables = getattr(source, name) if has_variables(source) else resolve(source, "model")
    found = [unwrapped(variable) for variable in variables]
    return [variable for variable in found if id(variable) not in known and variable.dtype.is_floating]


def _named(variables: list, taken: dict) -> dict[str, tf.Variable]:
    """Return {name: variable} with names that are not in `taken`; tied variables appear once."""
    names: dict[int, str] = {}
    found: dict[str, tf.Variable] = {}
    for outer in variables:
        variable = checked(outer, "model")
        if id(variable) not in names:
            name = unique_name(getattr(outer, "path", None) or plain_name(variable), {**taken, **found})
            names[id(variable)] = name
            found[name] = variable
    return found


def has_variables(source) -> bool:
    """Return whether this is a model; looks at the type, as attributes of an unbuilt model may raise."""
    return hasattr(type(source), "trainable_variables")


def _may_come_late(source) -> bool:
    return has_variables(source) or callable(source)


def resolve(source, argument: str = "parameters") -> list:
    """Return the list of trained variables; raise TypeError, naming the argument, if `source` does not give a list."""
    if isinstance(source, tf.Variable):
        raise TypeError(f"{argument} must be a list of variables, got a single one; pass [variable]")
    if has_variables(source):
        source = source.trainable_variables
    if callable(source):
        source = source()
    if isinstance(source, Mapping):  # its names would not be those in a checkpoint, as they are in PyTorch
        raise TypeError(
            f"{argument} must be a list of tf.Variable, got a {type(source).__name__}: pass its .values(); variables "
            "have names of their own"
        )
    if not isinstance(source, Iterable):
        raise TypeError(f"{argument} must be a list of tf.Variable, got {type(source).__name__}")
    return list(source)


def unwrapped(variable):
    """Return the tf.Variable inside a variable of Keras 3, or of a mixed policy of Keras 2."""
    inner = variable._variable if hasattr(variable, "_should_cast") else getattr(variable, "value", None)
    is_outer = not isinstance(variable, tf.Variable) or hasattr(variable, "_should_cast")
    return inner if is_outer and isinstance(inner, tf.Variable) else variable


def is_frozen_for_ever(variable) -> bool:
    """Return whether a variable can never be trained, such as one of integers; such variables are ignored."""
    inner = unwrapped(variable)
    return isinstance(inner, tf.Variable) and not inner.trainable and inner.dtype.base_dtype not in DTYPES


def plain_name(variable: tf.Variable) -> str:
    """Return the name without the output number."""
    return variable.name.removesuffix(":0")


def checked(variable, argument: str = "parameters") -> tf.Variable:
    """Return the unwrapped tf.Variable; raise TypeError or ValueError if its type or shape is not supported."""
    variable = unwrapped(variable)
    if not isinstance(variable, tf.Variable):
        raise TypeError(f"{argument} must be a list of tf.Variable, got entries of type {type(variable).__name__}")
    if variable.dtype.base_dtype not in DTYPES:  # of a RefVariable of TensorFlow 1 it is another one
        raise TypeError(
            f"{variable.name}: gradients must be float32, float64, float16 or bfloat16, got {variable.dtype.name}"
        )
    if not variable.shape.is_fully_defined():
        raise ValueError(f"{variable.name} must have a known shape, got {variable.shape}")
    return variable
