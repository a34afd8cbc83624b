"""In every example, either the optimizer or the compressor has momentum and weight decay."""

from types import SimpleNamespace

import pytest
import torch

IN_THE_COMPRESSOR = {"dgc", "samomentum"}


class Chosen(Exception):
    """What a comparison chose for a method."""


class Trainer:
    """Say what was chosen, in place of training."""

    def __init__(self, seed):
        pass

    def compress(self, method, settings, lr, momentum):
        raise Chosen(settings.get("momentum"), momentum)


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
        expected = (0.8, True, 0.01)
        if method in IN_THE_COMPRESSOR and size > 1:  # a single process calls no compressor
            expected = (0.0, False, 0.01 if framework == "tensorflow" else 0.0)
        assert found == expected, (method, size)


@pytest.mark.parametrize(("framework", "expected"), [("torch", 0.01), ("tensorflow", None)])
def test_the_compressor_has_weight_decay_where_the_optimizer_adds_it_to_the_gradient(framework, expected, load):
    """Keras' optimizers decay the weights, not through the gradient: with every method the optimizer does it."""
    reporting = load("reporting")
    training = load({"torch": "pytorch", "tensorflow": "tensorflow2"}[framework] + "_training")
    compression = dict.fromkeys(map(reporting.name_of, reporting.SWITCHES))
    more = {"host": "horovod", "tensorboard": None, "nesterov": False, "clip_norm": 0.0, "rank": 0, "seed": 0}
    model = torch.nn.Linear(2, 2)
    if framework == "tensorflow":
        model = SimpleNamespace(trainable_variables=[])
    for method in IN_THE_COMPRESSOR:
        args = SimpleNamespace(**{**compression, **more}, method=method, size=2, momentum=0.8, weight_decay=0.01)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reporting, "choose_compression", lambda *arguments: arguments[-1])
            assert training.make_compression(model, args, 0).get("weight_decay") == expected
