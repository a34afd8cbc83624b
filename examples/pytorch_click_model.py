"""A click model like DLRM (Naumov et al., 2019), cut where "Dynamic Communication Thresholding" cut it (section 3.1).

Two MLPs of four layers, embeddings, and the dot products between them. Stages pass (activations, categories) on.
"""

import itertools

import click_data
import torch
from torch import nn

EMBEDDING = 16


def dense(sizes, last=None):
    """Return fully connected layers with a ReLU each, the last of them with another module, or none."""
    layers = []
    for number, (before, after) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(before, after), nn.ReLU() if last is None or number < len(sizes) - 2 else last]
    return nn.Sequential(*layers)


class Bottom(nn.Module):
    """The first two layers: dense features to activations float32[n, 256]."""

    def __init__(self):
        super().__init__()
        self.layers = dense((click_data.DENSE, 512, 256))

    def forward(self, features, categories):
        """Return activations, and the categories for those who look them up."""
        return self.layers(features), categories


class Interaction(nn.Module):
    """Two more layers, the embeddings, dot products, and two layers of the second MLP: float32[n, 256]."""

    def __init__(self):
        super().__init__()
        self.layers = dense((256, 64, EMBEDDING))
        self.embeddings = nn.ModuleList(nn.Embedding(size, EMBEDDING) for size in click_data.CATEGORIES)
        for embedding in self.embeddings:
            nn.init.normal_(embedding.weight, std=0.1)
        vectors = 1 + len(click_data.CATEGORIES)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.top = dense((EMBEDDING + self.pairs.shape[1], 512, 256))

    def forward(self, activations, categories):
        """Return activations."""
        below = self.layers(activations)
        looked_up = [embedding(categories[:, i]) for i, embedding in enumerate(self.embeddings)]
        vectors = torch.stack([below, *looked_up], dim=1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([below, products], dim=1))


class Top(nn.Module):
    """The last two layers: the logit of a click, float32[n, 1]."""

    def __init__(self):
        super().__init__()
        self.layers = dense((256, 128, 1), nn.Identity())

    def forward(self, activations):
        """Return logits."""
        return self.layers(activations)


class Chain(nn.Module):
    """Stages one after the other, as one stage."""

    def __init__(self, *stages):
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, *inputs):
        """Return the last stage's outputs."""
        for stage in self.stages:
            inputs = stage(*inputs) if isinstance(inputs, tuple) else stage(inputs)
        return inputs


def make_stages(count, seed):
    """Return the model as 1, 2 or 3 stages: no split, one after two layers, another two layers before the end."""
    torch.manual_seed(seed)
    bottom, interaction, top = Bottom(), Interaction(), Top()
    return {1: [Chain(bottom, interaction, top)], 2: [bottom, Chain(interaction, top)], 3: [bottom, interaction, top]}[
        count
    ]


def boundary_of(stage, boundary):
    """Return a Pipeline's boundary for a stage's outputs: categories, integers, always cross whole."""
    return {"0": boundary} if isinstance(stage, Bottom) else boundary
