"""Train a character-level transformer in stages on several ranks, with sparse activations between them (DCT-MP).

    mpirun -np 2 python examples/pytorch_dct_mp.py --density 0.05             # one boundary
    mpirun -np 5 python examples/pytorch_dct_mp.py --density 0.1 --blocks 5   # four
    python examples/pytorch_dct_mp.py --boundaries 2                          # on one rank: to study quality alone

The text is the source of Python's standard library. Horovod is not needed. As in Table 4 of "Dynamic Communication
Thresholding" (Gupta et al., 2021), with another text and a smaller network.
"""

import model_parallel_run
import torch
import torch.nn.functional as F
from pytorch_transformer import Block
from torch import nn

from hvd_sparse.torch.model_parallel import Pipeline, ThresholdBoundary


class Embedding(nn.Module):
    """Characters int64[n, length] to float32[n, length, width]."""

    def __init__(self, args):
        super().__init__()
        self.characters = nn.Embedding(model_parallel_run.CHARACTERS, args.width)
        self.places = nn.Parameter(0.02 * torch.randn(args.sequence_length, args.width))

    def forward(self, characters):
        """Return the sum of the character and position embeddings."""
        return self.characters(characters) + self.places[: characters.shape[1]]


def make_stage(stage, args):
    """Return a stage of the network, the same parameters for any number of stages but for their order."""
    torch.manual_seed(args.seed + 1000)
    embedding, blocks = Embedding(args), [Block(args.width, args.heads) for _ in range(args.blocks)]
    decoder = [nn.LayerNorm(args.width), nn.Linear(args.width, model_parallel_run.CHARACTERS)]
    layers = [embedding] if model_parallel_run.is_first(stage) else []
    layers += [blocks[number] for number in model_parallel_run.blocks_of(stage, args)]
    return nn.Sequential(*layers, *(decoder if model_parallel_run.is_last(stage, args) else []))


def cross_entropy(logits, targets):
    """Return the mean loss a character, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """This rank's part of the network, its pipeline and its optimizer."""

    def __init__(self, args, communicator):
        parts = []  # and between them boundaries whose rows are characters: a sample is a whole sequence
        for stage in model_parallel_run.stages_here(args):
            parts += [ThresholdBoundary(args.density, args.threshold, start_dim=-1)] if parts else []
            parts.append(make_stage(stage, args))
        self.stage = nn.Sequential(*parts)
        self.pipeline = Pipeline(
            self.stage,
            boundary=ThresholdBoundary(args.density, args.threshold, start_dim=-1),
            micro_batches=args.micro_batches,
            schedule=args.schedule,
            loss=cross_entropy,
            communicator=communicator,
        )
        self.optimizer = torch.optim.Adam(self.stage.parameters())

    def step(self, inputs, targets, lr):
        """Train on a batch; return its loss."""
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad()
        loss = self.pipeline.step(torch.from_numpy(inputs), torch.from_numpy(targets))
        self.optimizer.step()
        return loss

    def evaluate(self, inputs, targets):
        """Return the loss of a batch."""
        return self.pipeline.evaluate(torch.from_numpy(inputs), torch.from_numpy(targets))

    def stats(self):
        """Return this rank's traffic."""
        return self.pipeline.stats()

    def boundaries(self):
        """Return the statistics of the boundaries within this rank's part."""
        return [module.stats() for module in self.stage if isinstance(module, ThresholdBoundary)]

    def dp_ratio(self):
        """Return 1.0: there are no replicas."""
        return 1.0

    def close(self):
        """End the pipeline."""
        self.pipeline.close()


def prepare(args):
    """Seed PyTorch."""
    torch.manual_seed(args.seed)


if __name__ == "__main__":
    model_parallel_run.run("pytorch_dct_mp", __doc__, Trainer, prepare=prepare)
