"""An optimizer that trains what it does not reduce, and each rank alone, unless something else reduces it."""

import horovod.torch as hvd
import pytest
import torch
from helpers import assert_alive, assert_ranks_agree, distributed, make_parameters
from told import told

from hvd_sparse.torch import Compression


def late_layer(late, compresses):
    """Return two parameters, and their optimizer after two steps; the second one is added or unfrozen after these."""
    parameters = make_parameters({"early": (2000,), "late": (30,)})
    early, other = parameters["early"], parameters["late"]
    known = parameters if compresses == "all" else {"early": early}
    compression = Compression.gradient_dropping(known.items(), density=0.05)
    optimizer = torch.optim.SGD([early] if late == "added" else [early, other], lr=0.1)
    other.requires_grad_(late == "added")
    named = known if late == "added" and compresses == "early, unnamed" else parameters
    optimizer = distributed(named, compression, optimizer=optimizer)
    if late == "added":
        optimizer.add_param_group({"params": [other], "lr": 0.1})
    for _ in range(2):
        (early.sum() * 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    other.requires_grad_(True)
    return early, other, optimizer


@pytest.mark.parametrize("late", ["added", "unfrozen"])
def test_what_horovod_does_not_reduce_is_refused(late):
    """What has no gradient, or is frozen, is left in peace."""
    early, other, optimizer = late_layer(late, "all")
    (early.sum() + other.sum()).backward()
    with pytest.raises(RuntimeError, match="does not reduce the gradient of late, and each rank would"):
        optimizer.step()
    assert_alive()


@pytest.mark.parametrize("compresses", ["early", "early, unnamed"])
@pytest.mark.parametrize("late", ["added", "unfrozen"])
def test_what_the_compressor_lacks_too_is_warned_of_once(late, compresses):
    """The user may reduce it himself."""
    early, other, optimizer = late_layer(late, compresses)
    before = other.detach().clone()

    def training():
        for _ in range(3):
            (early.sum() + other.sum() * (1 + hvd.rank())).backward()
            hvd.allreduce_(other.grad, name="of_the_user")
            optimizer.step()
            optimizer.zero_grad()

    found = told(training)
    unnamed = late == "added" and compresses == "early, unnamed"
    which = "a parameter of shape (30,)" if unnamed else "late"
    assert len(found) == (hvd.rank() == 0), found
    assert all(f"also trains {which}, which neither Horovod nor a compressor reduces" in one for one in found)
    torch.testing.assert_close(other, before - 0.1 * 3 * (1 + hvd.size()) / 2)  # the mean of 1, 2, ...


def test_what_another_compressor_has_is_not_warned_of():
    parameters = make_parameters({"one": (2000,), "two": (3000,)})
    one, two = parameters.values()
    ours = Compression.gradient_dropping({"one": one}, density=0.05)
    theirs = Compression.gradient_dropping({"two": two}, density=0.05)
    first = distributed({"one": one}, ours, optimizer=torch.optim.SGD([one], lr=0.1))
    second = distributed({"two": two}, theirs, optimizer=torch.optim.SGD([two], lr=0.1))
    first.add_param_group({"params": [two]})

    def training():
        for _ in range(2):
            ((one + two[:2000]).sum() * (1.0 + hvd.rank())).backward()
            second.synchronize()
            first.step()
            first.zero_grad()

    assert not told(training)
    assert_ranks_agree(parameters)


def test_what_another_optimizer_has_reduced_trains():
    """As Horovod's hooks stay at the parameters when they move to the groups of another optimizer."""
    parameters = make_parameters({"one": (2000,), "two": (3000,)})
    one, two = parameters.values()
    compression = Compression.gradient_dropping(parameters.items(), density=0.05)
    moves = torch.optim.SGD([one], lr=0.1)
    first = distributed(parameters, compression, optimizer=moves)
    second = distributed(parameters, compression, optimizer=torch.optim.SGD([two], lr=0.1))
    first.add_param_group({"params": second.param_groups[0]["params"]})
    before = two.detach().clone()
    for _ in range(2):
        ((one + two[:2000]).sum() * (1.0 + hvd.rank())).backward()
        first.synchronize()
        second.synchronize()
        with first.skip_synchronize():
            first.step()
    assert not torch.equal(before, two)
    assert_ranks_agree(parameters)
