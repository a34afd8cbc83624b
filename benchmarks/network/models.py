"""The models of `methods.py` in PyTorch, and their batches."""

import copy
import statistics
import sys
from pathlib import Path
from time import perf_counter

import torch
from methods import MODELS, Layers, Recurrent
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from steps import resnet50


class Language(nn.Module):
    """Embedding, LSTM and decoder. The output is the loss."""

    def __init__(self, spec: Recurrent):
        super().__init__()
        self.embedding = nn.Embedding(spec.words, spec.hidden)
        self.lstm = nn.LSTM(spec.hidden, spec.hidden, spec.layers, batch_first=True)
        self.decoder = nn.Linear(spec.hidden, spec.words)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of the next words."""
        output, _ = self.lstm(self.embedding(words))
        return nn.functional.cross_entropy(self.decoder(output).flatten(0, 1), targets.flatten())


class Classifier(nn.Module):
    """A multi-layer perceptron. The output is the loss."""

    def __init__(self, spec: Layers):
        super().__init__()
        layers = []
        for inputs, outputs in zip(spec.widths, spec.widths[1:], strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of the labels."""
        return nn.functional.cross_entropy(self.layers(features), labels)


class Products(nn.Module):
    """Parameters of given shapes. The loss is the sum of their products with any batch."""

    def __init__(self, shapes: list[tuple[int, ...]]):
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, *factors: torch.Tensor) -> torch.Tensor:
        """Return the sum of products."""
        return sum(torch.dot(p.view(-1), f.view(-1)) for p, f in zip(self.tensors, factors, strict=True))


def build(name: str) -> nn.Module:
    """Return the model of this name, with the same weights on every rank."""
    torch.manual_seed(0)
    spec = MODELS[name]
    if isinstance(spec, Recurrent):
        return Language(spec)
    return Classifier(spec) if isinstance(spec, Layers) else Products(resnet50())


def numels(name: str) -> list[int]:
    """Return the number of elements of each parameter."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in build(name).parameters()]


def batches(name: str, size: int, seed: int, count: int = 4) -> list[tuple[torch.Tensor, ...]]:
    """Return a few batches, which differ between ranks. Steps use them in turns."""
    spec, generator = MODELS[name], torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        if isinstance(spec, Recurrent):
            words = torch.randint(spec.words, (size, spec.length + 1), generator=generator)
            made.append((words[:, :-1].contiguous(), words[:, 1:].contiguous()))
        elif isinstance(spec, Layers):
            labels = torch.randint(spec.widths[-1], (size,), generator=generator)
            made.append((torch.randn((size, spec.widths[0]), generator=generator), labels))
        else:
            made.append(tuple(torch.randn(shape, generator=generator) for shape in resnet50()))
    return made


def train_alone(model: nn.Module, momentum: float, data: list[tuple[torch.Tensor, ...]], steps: int) -> float:
    """Return the seconds of a training step of a copy of the model without an exchange."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.grad = None
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.001, momentum=momentum)
    times = []
    for step in range(steps + 1):
        start = perf_counter()
        optimizer.zero_grad()
        twin(*data[step % len(data)]).backward()
        optimizer.step()
        times.append(perf_counter() - start)
    return statistics.median(times[1:])
