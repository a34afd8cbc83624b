"""Train a character-level LSTM on the source of Python's standard library with a choice of compression.

    horovodrun -np 4 python examples/pytorch_char_lstm.py --method dgc
    torchrun --nproc-per-node 4 examples/pytorch_char_lstm.py --method dgc --host ddp

The text comes with the interpreter: compare perplexities of one Python version only.
"""

import argparse
import time

import char_data
import pytorch_training as training
import reporting
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """Embedding, one LSTM layer and a linear layer over the printable ASCII characters."""

    def __init__(self, hidden):
        super().__init__()
        self.embedding = nn.Embedding(len(char_data.CHARACTERS), 64)
        self.lstm = nn.LSTM(64, hidden, batch_first=True)
        self.decoder = nn.Linear(hidden, len(char_data.CHARACTERS))
        with torch.no_grad():
            self.lstm.bias_ih_l0[hidden : 2 * hidden] = 1.0  # remember by default

    def forward(self, characters, state=None):
        """Return the logits of each next character and the next state."""
        output, state = self.lstm(self.embedding(characters), state)
        return self.decoder(output), state


def parse_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    training.add_arguments(parser, batch_size=8, lr=1.0, clip_norm=0.25)
    training.add_step_arguments(parser, steps=6000, evaluations=6)
    parser.add_argument("--hidden", type=reporting.positive_integer, default=64, help="(default: %(default)s)")
    parser.add_argument("--sequence-length", type=reporting.positive_integer, default=32, help="(default: %(default)s)")
    parser.add_argument("--plot", metavar="PATH", help='(default: char_lstm-METHOD.png; "" for none)')
    return training.start(parser)


def load_text():
    """Return the training and the held-out characters (the last tenth) as int64 tensors."""
    return tuple(torch.from_numpy(characters) for characters in char_data.load_text())


def training_windows(characters, args):
    """Yield (inputs, targets, is_start) endlessly from this rank's streams, in reading order."""
    streams = char_data.split_streams(characters, args.batch_size * args.size)[args.rank :: args.size].to(args.device)
    if streams.shape[1] <= args.sequence_length:
        raise SystemExit(
            f"{len(characters)} characters are too few for {args.size} ranks with --batch-size {args.batch_size} and "
            f"windows of {args.sequence_length} characters: make --batch-size or the windows smaller"
        )
    while True:
        for start in range(0, streams.shape[1] - args.sequence_length, args.sequence_length):
            window = streams[:, start : start + args.sequence_length + 1]
            yield window[:, :-1], window[:, 1:], start == 0


def training_losses(model, text, args):
    """Yield the loss of each window endlessly; the LSTM's state goes on from window to window."""
    state = None
    for inputs, targets, is_start in training_windows(text, args):
        model.train()
        output, state = model(inputs, None if is_start else state)
        yield F.cross_entropy(output.flatten(0, 1), targets.flatten())
        state = tuple(part.detach() for part in state)


def evaluate(model, characters, args):
    """Return the mean loss per character over the held-out text; the same for any number of ranks."""
    model.eval()
    streams = char_data.split_streams(characters, char_data.EVALUATION_STREAMS)[args.rank :: args.size].to(args.device)
    total, count, state = 0.0, 0, None
    with torch.no_grad():
        for window in streams.split(256, dim=1) if len(streams) else ():
            output, state = model(window, state)
            target = window[:, 1:]  # the first character of each window is not scored
            total += F.cross_entropy(output[:, :-1].flatten(0, 1), target.flatten(), reduction="sum").item()
            count += target.numel()
    total, count = training.sum_over_ranks([total, count], "held_out", args)
    return total / count


def run(args):
    """Train; every rank takes part, rank 0 reports."""
    train_text, held_out_text = load_text()
    args.warmup_steps = reporting.warmup_steps(args.warmup_steps, args.steps)
    model = Model(args.hidden).to(args.device)
    model, optimizer, compression = training.distribute(model, args, args.warmup_steps)
    traffic = reporting.Traffic(training.count_parameters(model), compression, args)

    start = time.perf_counter()
    losses = training_losses(model, train_text, args)
    rows = training.train_steps(model, optimizer, losses, lambda: evaluate(model, held_out_text, args), traffic, args)
    seconds = time.perf_counter() - start

    settings = {"hidden": args.hidden, "sequence_length": args.sequence_length}
    training.report_steps("pytorch_char_lstm", "character LSTM", rows, traffic, seconds, args, **settings)


def main():
    """Run the example on every rank."""
    args = parse_arguments()
    run(args)
    training.finish(args)


if __name__ == "__main__":
    main()
