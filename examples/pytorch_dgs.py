"""Train asynchronously with a parameter server and dual-way sparsification (DGS), or one of its baselines.

    mpirun -np 4 python examples/pytorch_dgs.py --method dgs                       # three workers, one server
    mpirun -np 2 python examples/pytorch_dgs.py --task char_lstm --servers colocated

Tasks: `digits`, a convolutional network with batch normalisation, and `char_lstm`, an LSTM on the source of Python's
standard library. Horovod is not needed.
"""

import asynchronous_run
import char_data
import reporting
import torch
import torch.nn.functional as F
from torch import nn

from hvd_sparse.torch.asynchronous import connect


class Digits(asynchronous_run.Digits):
    """The network with images float32[n, 1, 8, 8]."""

    def make_model(self):
        """Return the network."""
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def losses(self, model):
        """Yield the loss of one batch after the other, endlessly."""
        for images, labels in self.arrays():
            yield F.cross_entropy(model(torch.from_numpy(images[:, None])), torch.from_numpy(labels))

    def evaluate(self, model):
        """Return loss and accuracy, in percent, on the test set."""
        images, labels = torch.from_numpy(self.test_images[:, None]), torch.from_numpy(self.test_labels)
        logits = model(images)
        accuracy = 100.0 * (logits.argmax(1) == labels).double().mean().item()
        return F.cross_entropy(logits, labels).item(), accuracy


class Characters(nn.Module):
    """Embedding, one LSTM layer and a linear layer over the printable ASCII characters."""

    def __init__(self, hidden):
        super().__init__()
        self.embedding = nn.Embedding(len(char_data.CHARACTERS), 64)
        self.lstm = nn.LSTM(64, hidden, batch_first=True)
        self.decoder = nn.Linear(hidden, len(char_data.CHARACTERS))

    def forward(self, characters, state=None):
        """Return the logits of each next character and the next state."""
        output, state = self.lstm(self.embedding(characters), state)
        return self.decoder(output), state


class CharLSTM(asynchronous_run.CharLSTM):
    """The network, whose state is given and returned."""

    def make_model(self):
        """Return the network."""
        return Characters(self.args.hidden)

    def losses(self, model):
        """Yield the loss of one window after the other, endlessly."""
        state = None
        for characters, targets, is_start in self.arrays():
            state = None if is_start else tuple(part.detach() for part in state)
            logits, state = model(torch.from_numpy(characters), state)
            yield F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())

    def evaluate(self, model):
        """Return loss per character, and perplexity, on the held-out text."""
        losses, count, state = 0.0, 0, None
        for characters, targets in self.held_out_windows():
            logits, state = model(torch.from_numpy(characters), state)
            losses += F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), reduction="sum").item()
            count += targets.size
        return losses / count, char_data.perplexity(losses / count)


TASKS = {"digits": Digits, "char_lstm": CharLSTM}


def train(session, task, model, args):
    """Train; return one dict of metrics per evaluation, on the first worker, of the servers' model."""
    optimizer = session.optimizer(lr=args.lr, weight_decay=args.weight_decay)
    losses, everyones = task.losses(model), task.make_model()

    def step(number):
        optimizer.param_groups[0]["lr"] = reporting.learning_rate(args.lr, number, args.steps, args.warmup_steps)
        optimizer.zero_grad()
        loss = next(losses)
        loss.backward()
        if args.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        return loss.item()

    def evaluate():
        everyones.load_state_dict(session.global_state_dict())
        with torch.no_grad():
            return task.evaluate(everyones.eval())

    return asynchronous_run.train(session, task, args, step, evaluate)


def prepare(args):
    """Seed PyTorch."""
    torch.manual_seed(args.seed)


if __name__ == "__main__":
    asynchronous_run.run("pytorch_dgs", __doc__, TASKS, prepare, connect, train)
