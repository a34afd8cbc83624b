"""Buffers of PyTorch models, such as those of batch normalisation, on one co-located rank: averaged, sent, saved."""

import numpy as np
import pytest
import torch
from torch import nn
from torch_session import learn, network, same


def test_buffers_are_averaged_and_in_the_global_state(join):
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    model.register_buffer("hidden", torch.ones(3), persistent=False)
    session = join(model, threads=2)  # the first of them has the buffers
    optimizer = session.optimizer(lr=0.1)
    learn(model, optimizer, 12)  # buffers are sent at the tenth step
    session.synchronize()
    assert session._state()[1].size == 9 + 9  # what is not in a state_dict is the same on every worker
    state = session.global_state_dict()
    assert state.keys() == model.state_dict().keys()
    same(state, model.state_dict())  # one worker: its own
    assert state["1.num_batches_tracked"].dtype == torch.int64 and state["1.num_batches_tracked"] == 12
    fresh = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    fresh.load_state_dict(state)
    model.eval(), fresh.eval()
    assert torch.equal(model(torch.ones(1, 6)), fresh(torch.ones(1, 6)))


def test_buffers_are_sent_if_they_have_changed(join):
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9))
    model.register_buffer("mask", torch.full((5,), -torch.inf))
    session = join(model)
    session.share_buffers()
    sent = session.stats()["bytes_up"]
    session.share_buffers()
    assert session.stats()["bytes_up"] == sent
    model[1].running_mean[2] = 3.0
    session.share_buffers()
    assert session.stats()["bytes_up"] > sent
    with pytest.warns(UserWarning, match="1 elements of the model's buffers have become NaN or infinity"):
        model[1].running_mean[0] = torch.nan
        session.share_buffers()
    model[1].running_mean[2] = 4.0
    assert session.global_state_dict()["1.running_mean"][:3].tolist() == [0.0, 0.0, 4.0]
    assert session.global_state_dict()["mask"].tolist() == 5 * [-torch.inf]


def test_what_is_saved_has_the_present_buffers(join, tmp_path):
    """Also between the tenth steps, in which buffers are sent; and the last ones are there once a worker has left."""
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    session = join(model)
    optimizer = session.optimizer(lr=0.1)
    learn(model, optimizer, 3)
    session.save(str(tmp_path / "saved.npz"))
    present = torch.cat([model[1].running_mean, model[1].running_var])
    assert present[:9].abs().max() > 0.01
    assert np.load(tmp_path / "saved.npz")["buffers"].tolist() == present.tolist()
    learn(model, optimizer, 3)
    server = session._local.servers[0]
    session.close()
    last = torch.cat([model[1].running_mean, model[1].running_var])
    assert server.state()[1]["buffers"].tolist() == last.tolist() != present.tolist()


class Cached(nn.Module):
    """Batch normalisation beside a cache that appears in the first forward, or grows, and has other elements then."""

    def __init__(self, cache=None):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 2), nn.BatchNorm1d(2)
        if cache is not None:
            self.register_buffer("cache", cache)

    def forward(self, x):
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.zeros(8))
        elif self.cache.numel() == 4:
            self.cache = torch.zeros(16)
        return self.norm(self.linear(x)) + self.cache[:2]


@pytest.mark.parametrize("cache", [None, torch.zeros(4), torch.zeros(3)], ids=["appears", "grows", "stays"])
def test_a_buffer_that_appears_or_grows_leaves_the_others_averaged(join, tmp_path, cache):
    model = Cached(cache)
    session = join(model)
    learn(model, session.optimizer(lr=0.1), 20)
    state = session.global_state_dict()
    same(state, model.state_dict())  # one worker: its own
    assert state["norm.running_mean"].abs().max() > 0.01
    session.save(str(tmp_path / "saved.npz"))
    restored = Cached(cache)
    join(restored, restore=str(tmp_path / "saved.npz"))
    assert torch.equal(restored.norm.running_mean, state["norm.running_mean"])
    statistics = session._local.servers[0].statistics
    assert statistics.refused == statistics.repeated == 0


def test_a_buffer_that_is_gone_leaves_the_others_averaged(join):
    model = Cached(torch.zeros(3))
    session = join(model)
    model.cache = None
    session.share_buffers()
    same(session.global_state_dict(), model.state_dict())


def test_buffers_that_float32_rounds_stay(join):
    """Where the average is what this worker would send itself."""
    model = network()
    model.register_buffer("origin", torch.tensor([1.7e9 + 1 / 3, 0.1], dtype=torch.float64))
    session = join(model)
    assert model.origin.tolist() == [1.7e9 + 1 / 3, 0.1]
    assert session.global_state_dict()["origin"].tolist() == [1.7e9 + 1 / 3, 0.1]
