"""An optimizer that trains what it does not reduce is refused: each rank would train it alone."""

import horovod.torch as hvd
import pytest
import torch
from helpers import assert_alive, assert_ranks_agree, distributed, make_parameters

from hvd_sparse.torch import Compression


@pytest.mark.parametrize("compresses", ["all", "early", "early, unnamed"])
@pytest.mark.parametrize("late", ["added", "unfrozen"])
def test_what_horovod_does_not_reduce_is_refused(late, compresses):
    """What has no gradient, or is frozen, is left in peace."""
    parameters = make_parameters({"early": (2000,), "late": (30,)})
    early, other = parameters["early"], parameters["late"]
    known = parameters if compresses == "all" else {"early": early}
    compression = Compression.gradient_dropping(known.items(), density=0.05)
    optimizer = torch.optim.SGD([early] if late == "added" else [early, other], lr=0.1)
    other.requires_grad_(late == "added")
    named = known if late == "added" and compresses == "early, unnamed" else parameters
    optimizer = distributed(named, compression, optimizer=optimizer)
    if late == "added":
        optimizer.add_param_group({"params": [other]})
    for _ in range(2):
        (early.sum() * 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    other.requires_grad_(True)
    (early.sum() + other.sum()).backward()
    name = "late" if named is parameters else r"a parameter of shape \(30,\)"
    with pytest.raises(RuntimeError, match=f"does not reduce the gradient of {name}, and each rank would") as caught:
        optimizer.step()
    assert ("The compressor lacks it, too" in str(caught.value)) == (compresses != "all")
    assert_alive()


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
