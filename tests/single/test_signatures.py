"""The signatures of the methods are explicit and equal in both frameworks, and every argument is documented."""

import inspect
import pydoc
import re
from dataclasses import fields

import pytest

from hvd_sparse.algorithms import METHODS, Algorithm, CompressionMethods, Settings
from hvd_sparse.parameter_server import METHODS as ASYNCHRONOUS

NAMES = sorted(name for name in dir(CompressionMethods) if not name.startswith("_"))
REQUIRED = {"hard_threshold": {"value": 1.0}}


def parameters_of(name):
    return inspect.signature(getattr(CompressionMethods, name)).parameters


def test_all_methods_are_there():
    assert NAMES == sorted("cltk dct dgc gradient_dropping hard_threshold micro random_k samomentum sidco topk".split())
    assert sorted(METHODS) == NAMES and METHODS["dgc"].__name__ == "DeepGradientCompression"


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_explicit_typed_and_documented(name):
    parameters, text = parameters_of(name), inspect.getdoc(getattr(CompressionMethods, name))
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}, "no *args, no **settings"
    documented = re.findall(r"^    (\w+): ", text.split("Args:")[1].split("Returns:")[0], re.M)
    assert sorted(documented) == sorted(parameters)
    assert all(parameter.annotation is not parameter.empty for parameter in parameters.values())
    for word in ("DENSITY", "SHARED", "MOMENTUM"):
        assert word not in text
    rendered = pydoc.render_doc(getattr(Settings, name))
    assert all(f"{argument}:" in rendered for argument in parameters)


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_arrives(name):
    """What a method is called with is what its settings hold; what it is not called with, the signature's default."""
    settings = getattr(Settings, name)(None, **REQUIRED.get(name, {}))
    assert isinstance(settings, Algorithm)
    assert settings.name == name and type(settings) is METHODS[name]
    parameters = parameters_of(name)
    assert {field.name for field in fields(settings)} == set(parameters) - {"parameters", "process_set", "sparsity"}
    for field in fields(settings):
        value, default = getattr(settings, field.name), parameters[field.name].default
        if (name, field.name) not in (("dct", "density"), ("hard_threshold", "value")):
            assert value == default
    assert getattr(Settings, name)(None, **REQUIRED.get(name, {}), min_numel=7, values="int1", seed=3) == type(
        settings
    )(
        **{field.name: getattr(settings, field.name) for field in fields(settings)}
        | {"min_numel": 7, "values": "int1", "seed": 3}
    )


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_frameworks_add_nothing(framework):
    module = pytest.importorskip(f"hvd_sparse.{framework}")
    for name in NAMES:
        ours = getattr(module.Compression, name)
        assert ours.__func__ is getattr(CompressionMethods, name).__func__
        with pytest.raises(TypeError, match="densty"):
            ours([], densty=0.1)


def test_a_wrong_argument_is_reported_with_the_name_that_users_know():
    with pytest.raises(TypeError, match=r"^Compression\.dgc\(\) got an unexpected keyword argument 'compress_ratio'"):
        Settings.dgc(None, compress_ratio=0.1)


@pytest.mark.parametrize("method", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)
def test_asynchronous_methods_document_every_argument(method):
    text = inspect.getdoc(method)
    if "Args:" in text:
        named = [field.name for field in fields(method)]
        assert all(text.count(f"\n    {name}: ") == 1 for name in named), named
    else:
        assert issubclass(method, ASYNCHRONOUS["asgd"])  # dense
