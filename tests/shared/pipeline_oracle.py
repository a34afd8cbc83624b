"""Trains a pipeline's stages in one process without a pipeline: autograd through masks made by NumPy.

Stage s is a module. Between two stages, the activations of each micro-batch are multiplied by the reference's mask.
"""

import itertools

import numpy as np
import torch

from hvd_sparse import reference


def make_stages(sizes, seed=0):
    """Return one module for each stage: stage s has sizes[s] input features and sizes[s + 1] output features."""
    torch.manual_seed(seed)
    return [
        torch.nn.Sequential(torch.nn.Linear(before, after), torch.nn.Tanh())
        for before, after in itertools.pairwise(sizes)
    ]


class OracleMask(torch.nn.Module):
    """A boundary that uses the reference and computes the running threshold."""

    def __init__(self, density, threshold="topk", momentum=0.1):
        super().__init__()
        self.density, self.threshold, self.momentum, self.running = density, threshold, momentum, None
        self.kept = []

    def forward(self, x):
        rows = x.detach().float().numpy().reshape(-1, x.shape[-1])
        if self.density == 1.0:
            return x
        if self.threshold == "topk":
            mask, _ = reference.select_top_k_rows(rows, max(1, int(self.density * rows.shape[1] + 0.5)))
        elif self.training:
            thresholds = reference.laplace_threshold_rows(rows, self.density)
            mask = reference.filter_threshold_rows(rows, thresholds)
            mean = np.float32(thresholds.mean())
            part = np.float32(self.momentum)
            self.running = mean if self.running is None else self.running + part * (mean - self.running)
        else:
            mask = reference.filter_threshold_rows(rows, [float(self.running)])
        self.kept.append(mask.mean())
        return x * torch.from_numpy(mask.reshape(x.shape)).to(x.dtype)


class Oracle:
    """The stages, trained as the pipeline should train them."""

    def __init__(self, stages, masks, loss, micro_batches, lr):
        layers = [stages[0]]
        for mask, stage in zip(masks, stages[1:], strict=True):
            layers += [mask, stage]
        self.network = torch.nn.Sequential(*layers)
        self.loss, self.micro_batches = loss, micro_batches
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=lr, momentum=0.9)

    def step(self, inputs, targets):
        """Train on a batch; return its loss."""
        self.network.train()
        self.optimizer.zero_grad()
        parts = min(self.micro_batches, len(inputs))
        total = 0.0
        for x, y in zip(np.array_split(inputs, parts), np.array_split(targets, parts), strict=True):
            x, y = torch.from_numpy(x), torch.from_numpy(y)
            loss = self.loss(self.network(x), y) * (len(x) / len(inputs))
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total

    def evaluate(self, inputs, targets):
        """Return the loss of a batch and the outputs, with the running thresholds of training."""
        self.network.eval()
        with torch.no_grad():
            outputs = self.network(torch.from_numpy(inputs))
            return self.loss(outputs, torch.from_numpy(targets)).item(), outputs
