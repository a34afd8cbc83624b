"""The tasks for asynchronous methods in one process: digits, and a character LSTM."""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import char_data
import digits_data


class Digits:
    """Two layers (64, 128, 10) on scikit-learn's digits: a small model, so that workers can make many updates."""

    def __init__(self, batch_size: int):
        flat = torch.nn.Flatten()
        self.model = torch.nn.Sequential(flat, torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self._batch_size = batch_size
        self._images, self._test_images, self._labels, self._test_labels = digits_data.load()

    def loss(self, random: np.random.Generator, worker: int) -> torch.Tensor:
        """Return the loss of a worker's next batch."""
        batch = random.integers(0, len(self._images), self._batch_size)
        images = torch.from_numpy(digits_data.shifted(self._images[batch], random))
        return torch.nn.functional.cross_entropy(self.model(images), torch.from_numpy(self._labels[batch]))

    def evaluate(self) -> tuple[float, float]:
        """Return the metric and the loss on the held-out data."""
        labels = torch.from_numpy(self._test_labels)
        output = self.model(torch.from_numpy(self._test_images))
        accuracy = 100.0 * (output.argmax(1) == labels).double().mean().item()
        return accuracy, torch.nn.functional.cross_entropy(output, labels).item()


class Characters(torch.nn.Module):
    """A character LSTM with 64 cells and 46 k parameters."""

    def __init__(self):
        super().__init__()
        characters = len(char_data.CHARACTERS)
        self.embedding = torch.nn.Embedding(characters, 32)
        self.lstm = torch.nn.LSTM(32, 64, batch_first=True)
        self.output = torch.nn.Linear(64, characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next character at each position."""
        return self.output(self.lstm(self.embedding(characters))[0])


class CharLSTM:
    """The source of Python's standard library in windows of 32 characters. Each window starts with a zero state."""

    WINDOW, HELD_OUT = 32, 512  # characters, windows

    def __init__(self, batch_size: int):
        self.model = Characters()
        self._batch_size = batch_size
        self._training, held_out = map(torch.from_numpy, char_data.load_text())
        windows = held_out[: len(held_out) // (self.WINDOW + 1) * (self.WINDOW + 1)].reshape(-1, self.WINDOW + 1)
        self._held_out = windows[: self.HELD_OUT]

    def loss(self, random: np.random.Generator, worker: int) -> torch.Tensor:
        """Return the loss of a worker's next batch."""
        starts = random.integers(0, len(self._training) - self.WINDOW - 1, self._batch_size)
        return self._loss(torch.stack([self._training[start : start + self.WINDOW + 1] for start in starts]))

    def evaluate(self) -> tuple[float, float]:
        """Return the metric and the loss on the held-out data."""
        loss = self._loss(self._held_out).item()
        return float(np.exp(min(loss, 50.0))), loss

    def _loss(self, windows: torch.Tensor) -> torch.Tensor:
        output = self.model(windows[:, :-1])
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), windows[:, 1:].flatten())


TASKS = {"digits": Digits, "char_lstm": CharLSTM}
