"""Gradient Dropping's local and global threshold, with and without layer normalisation (Aji and Heafield, section 5.2).

    horovodrun -np 4 python examples/pytorch_layer_norm.py

A global threshold compares gradients of tensors with different scales, so it rarely sends tensors with small gradients.
Layer normalisation makes the scales similar; per-tensor thresholds do not need it. A network predicts the next
character of Python's standard library from the previous sixteen. It is trained dense and with each threshold, with and
without normalisation. The table shows the perplexity, and how unevenly the tensors were sent: the lowest density of a
tensor over the density of all.
"""

import argparse
import math
import statistics
import sys

import char_data
import horovod.torch as hvd
import pytorch_char_lstm as text
import pytorch_training as training
import reporting
import torch
import torch.nn.functional as F
from torch import nn

CONTEXT, EMBEDDING = 16, 32
CHARACTERS = len(char_data.CHARACTERS)
RUNS = [(method, norm) for norm in (False, True) for method in ("dense", "local", "global")]


class Model(nn.Module):
    """Embeddings of the characters before, hidden layers, and a linear layer over the printable ASCII characters."""

    def __init__(self, hidden, layers, norm):
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, EMBEDDING)
        body, width = [], CONTEXT * EMBEDDING
        for _ in range(layers):
            body += [nn.Linear(width, hidden), *([nn.LayerNorm(hidden)] if norm else []), nn.ReLU()]
            width = hidden
        self.body = nn.Sequential(*body, nn.Linear(width, CHARACTERS))

    def forward(self, characters):
        """Return the logits of what follows each context in int64[streams, n]: float[streams, n - CONTEXT + 1, ...]."""
        contexts = self.embedding(characters).unfold(1, CONTEXT, 1)
        return self.body(contexts.flatten(2))


def parse_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=reporting.density, default=0.01, help="(default: %(default)s)")
    parser.add_argument("--steps", type=reporting.positive_integer, default=3000, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=reporting.positive_integer, default=8, help="(default: %(default)s)")
    parser.add_argument("--hidden", type=reporting.positive_integer, default=192, help="(default: %(default)s)")
    parser.add_argument("--layers", type=reporting.positive_integer, default=3, help="(default: %(default)s)")
    parser.add_argument("--lr", type=reporting.positive, default=0.2, help="peak (default: %(default)s)")
    parser.add_argument("--seeds", type=reporting.whole_number, nargs="+", default=[0], help="(default: 0)")
    parser.add_argument("--quiet", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    hvd.init()
    args.host = "horovod"
    args.rank, args.size, args.device, args.sequence_length = hvd.rank(), hvd.size(), "cpu", 32 + CONTEXT - 1
    args.verbose = args.rank == 0 and not args.quiet
    if args.size == 1:
        print(reporting.ONE_PROCESS, file=sys.stderr)
    return args


def make_optimizer(model, method, args):
    """Return Horovod's optimizer and the compressor, None for dense."""
    compression = None
    if method != "dense" and args.size > 1:
        from hvd_sparse.torch import Compression

        settings = {"density": args.density, "min_numel": reporting.MIN_NUMEL, "seed": args.seed}
        scope = {"local": "tensor", "global": "model"}[method]
        compression = Compression.gradient_dropping(model.named_parameters(), scope=scope, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    used = compression or hvd.Compression.none
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=used), compression


def train_over_seeds(method, norm, train_text, held_out, args):
    """Train once with each seed; return the means of the results, and each perplexity."""
    runs = []
    for seed in args.seeds:
        args.seed = seed
        runs.append(train(method, norm, train_text, held_out, args))
    means = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
    return {"method": method, "layer_norm": norm, **means, "each": [round(run["perplexity"], 3) for run in runs]}


def train(method, norm, train_text, held_out, args):
    """Train once; return one dict of results."""
    torch.manual_seed(args.seed)
    model = Model(args.hidden, args.layers, norm)
    optimizer, compression = make_optimizer(model, method, args)
    windows = text.training_windows(train_text, args)
    served = {name: 0 for name, p in model.named_parameters() if p.numel() >= reporting.MIN_NUMEL}
    with reporting.Progress(args.steps, args) as bar:
        bar.set_description(f"{method}{', layer norm' if norm else ''}")
        for step in range(args.steps):
            inputs, targets, _ = next(windows)
            training.set_learning_rate(optimizer, args.lr, step, args.steps, args.steps // 20)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets[:, CONTEXT - 1 :].flatten())
            loss.backward()
            optimizer.synchronize()
            for name, parameter in model.named_parameters():
                if name in served:
                    served[name] += int(torch.count_nonzero(parameter.grad)) / parameter.numel() / args.steps
            with optimizer.skip_synchronize():
                optimizer.step()
            bar.update()
    least, mean = min(served.values()), sum(served.values()) / len(served)
    loss = evaluate(model, held_out, args)
    density = compression.stats()["total"]["density"] if compression else 1.0
    return {"perplexity": math.exp(min(loss, 700.0)), "loss": loss, "density": density, "least_served": least / mean}


def evaluate(model, characters, args):
    """Return the mean loss per character over the held-out text."""
    streams = char_data.split_streams(characters, char_data.EVALUATION_STREAMS)[args.rank :: args.size]
    total, count = 0.0, 0
    with torch.no_grad():
        for window in streams.split(256, dim=1) if len(streams) else ():
            if window.shape[1] > CONTEXT:
                target = window[:, CONTEXT:]
                output = model(window[:, :-1])
                total += F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum").item()
                count += target.numel()
    total, count = training.sum_over_ranks([total, count], "held_out", args)
    return total / count


def main():
    """Run the experiment; every rank takes part, rank 0 reports."""
    args = parse_arguments()
    train_text, held_out = text.load_text()
    rows = [train_over_seeds(method, norm, train_text, held_out, args) for method, norm in RUNS]
    if args.rank == 0:
        if args.verbose:
            reporting.print_table(rows)
        settings = {name: getattr(args, name) for name in ("steps", "batch_size", "hidden", "layers", "lr", "seeds")}
        record = {"example": "pytorch_layer_norm", "target_density": args.density, "world_size": args.size}
        reporting.print_record({**record, **settings, "runs": rows})


if __name__ == "__main__":
    main()
