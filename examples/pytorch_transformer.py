"""Train a character-level transformer with AdamW on the source of Python's standard library, compressed or not.

    horovodrun -np 4 python examples/pytorch_transformer.py --method dgc --density 0.01
    torchrun --nproc-per-node 4 examples/pytorch_transformer.py --method dgc --density 0.01 --host ddp

The model is a decoder of 6.4 M parameters. `--momentum` is AdamW's `beta1`. Methods with momentum on the ranks (`dgc`,
`samomentum`) apply it there, and then AdamW has a `beta1` of 0. The text comes with the interpreter: compare losses of
one Python version only.
"""

import argparse
import time

import char_data
import pytorch_training as training
import reporting
import torch
import torch.nn.functional as F
from pytorch_char_lstm import load_text
from torch import nn

BETA2 = 0.99
HELD_OUT_WINDOWS = 128


class Block(nn.Module):
    """One layer: attention to the earlier characters, then two linear layers."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        """Return [batch, length, width]."""
        parts = self.attention(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.inner(self.norms[1](x))


class Model(nn.Module):
    """A decoder over the printable ASCII characters, for windows of up to `length` characters."""

    def __init__(self, width, layers, heads, length):
        super().__init__()
        characters = len(char_data.CHARACTERS)
        self.embedding, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, characters)

    def forward(self, characters):
        """Return the logits of each next character, [batch, length, characters]."""
        return self.head(self.blocks(self.embedding(characters) + self.places.weight[: characters.shape[1]]))


def parse_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    training.add_arguments(parser, batch_size=4, lr=1e-3, clip_norm=1.0)
    parser.set_defaults(weight_decay=0.1)
    training.add_step_arguments(parser, steps=1000, evaluations=10)
    parser.add_argument("--width", type=reporting.positive_integer, default=256, help="(default: %(default)s)")
    parser.add_argument("--layers", type=reporting.positive_integer, default=8, help="(default: %(default)s)")
    parser.add_argument("--heads", type=reporting.positive_integer, default=8, help="(default: %(default)s)")
    parser.add_argument("--sequence-length", type=reporting.positive_integer, default=64, help="(default: %(default)s)")
    parser.add_argument("--plot", metavar="PATH", help='(default: transformer-METHOD.png; "" for none)')
    args = training.start(parser)
    if args.width % args.heads:
        parser.error(f"--width must be a multiple of --heads, got {args.width} and {args.heads}")
    if args.nesterov and not reporting.compresses_momentum(args):
        parser.error("--nesterov is for --method dgc on several ranks: AdamW has none")
    args.warmup_steps = reporting.warmup_steps(args.warmup_steps, args.steps)
    args.decay, args.weight_decay = args.weight_decay, 0.0  # AdamW has it, not the compressor
    return args


def make_optimizer(model, args):
    """Return AdamW, which decays matrices only, and with a `beta1` of 0 if the ranks apply momentum."""
    beta1 = 0.0 if reporting.compresses_momentum(args) else args.momentum
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    groups = [{"params": matrices, "weight_decay": args.decay}, others]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(beta1, BETA2))


def training_windows(text, args):
    """Yield this rank's random windows endlessly, int64[batch_size, sequence_length + 1]."""
    random = torch.Generator().manual_seed(args.size * args.seed + args.rank)
    places = torch.arange(args.sequence_length + 1)
    while True:
        begins = torch.randint(len(text) - args.sequence_length, [args.batch_size, 1], generator=random)
        yield text[begins + places].to(args.device)


def loss_of(model, windows):
    """Return the mean cross-entropy of the next characters, in nats."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def evaluate(model, text, args):
    """Return the loss over windows spread evenly in the held-out text; the same for any number of ranks."""
    begins = torch.linspace(0, len(text) - args.sequence_length - 1, HELD_OUT_WINDOWS).long()[args.rank :: args.size]
    windows = text[begins[:, None] + torch.arange(args.sequence_length + 1)].to(args.device)
    with torch.no_grad():
        total = sum(float(loss_of(model, part)) * len(part) for part in windows.split(16))
    return training.sum_over_ranks([total], "held_out", args)[0] / HELD_OUT_WINDOWS


def run(args):
    """Train; every rank takes part, rank 0 reports."""
    train_text, held_out_text = load_text()
    if len(held_out_text) <= args.sequence_length:
        raise SystemExit(f"--sequence-length {args.sequence_length} is more than the held-out text has")
    model = Model(args.width, args.layers, args.heads, args.sequence_length).to(args.device)
    model, optimizer, compression = training.distribute(model, args, args.warmup_steps, make_optimizer)
    traffic = reporting.Traffic(training.count_parameters(model), compression, args)

    start = time.perf_counter()
    losses = (loss_of(model, windows) for windows in training_windows(train_text, args))
    rows = training.train_steps(model, optimizer, losses, lambda: evaluate(model, held_out_text, args), traffic, args)
    seconds = time.perf_counter() - start

    settings = {"sequence_length": args.sequence_length}
    training.report_steps("pytorch_transformer", "character transformer", rows, traffic, seconds, args, **settings)


def main():
    """Run the example on every rank."""
    args = parse_arguments()
    run(args)
    training.finish(args)


if __name__ == "__main__":
    main()
