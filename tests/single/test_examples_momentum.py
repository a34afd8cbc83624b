"""In every example, the optimizer has no momentum if the compressor has it."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
IN_THE_COMPRESSOR = {"dgc", "samomentum"}


class Chosen(Exception):
    """What a comparison chose for a method."""


class Trainer:
    """Say what was chosen, in place of training."""

    def __init__(self, seed):
        pass

    def compress(self, method, settings, lr, momentum):
        raise Chosen(settings.get("momentum"), momentum)


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_the_comparison_gives_one_momentum(load):
    reporting, compare = load("reporting"), load("compare_methods")
    args = SimpleNamespace(trainer=Trainer, seed=0, momentum=0.8, density=0.01, lr=0.1)
    for method in set(reporting.METHODS) - {"hard_threshold"}:  # its constant is that of a gradient
        with pytest.raises(Chosen) as chosen:
            compare.train(method, method, {}, None, args)
        assert chosen.value.args == ((0.8, 0.0) if method in IN_THE_COMPRESSOR else (None, 0.8)), method


def test_the_training_examples_give_one_momentum(load):
    reporting = load("reporting")
    defaults = {"seed": 0, "nesterov": False, "weight_decay": 0.0}
    compression = dict.fromkeys(map(reporting.name_of, reporting.SWITCHES))  # none is given
    for method in set(reporting.METHODS) - set(reporting.DENSE_METHODS):
        args = SimpleNamespace(method=method, size=2, momentum=0.8, clip_norm=0.0, **defaults, **compression)
        settings = reporting.compression_settings(args, warmup_steps=0)
        in_the_compressor = method in IN_THE_COMPRESSOR
        assert reporting.compresses_momentum(args) == in_the_compressor
        assert settings.get("momentum") == (0.8 if in_the_compressor else None), method


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_optimizers_of_the_training_examples_have_the_other_one(framework, load):
    reporting, training = (
        load("reporting"),
        load({"torch": "pytorch", "tensorflow": "tensorflow2"}[framework] + "_training"),
    )
    for method, size in [*((method, 2) for method in reporting.METHODS), ("dgc", 1)]:
        args = SimpleNamespace(method=method, size=size, momentum=0.8, nesterov=True, weight_decay=0.01, lr=0.1)
        if framework == "torch":
            (group,) = training.make_sgd(torch.nn.Linear(2, 2), args).param_groups
        else:
            group = training.make_sgd(args, 0.1).get_config()
        found = float(group["momentum"]), bool(group["nesterov"]), float(group["weight_decay"] or 0.0)
        in_the_compressor = method in IN_THE_COMPRESSOR and size > 1  # a single process calls no compressor
        assert found == ((0.0, False, 0.0) if in_the_compressor else (0.8, True, 0.01)), (method, size)
