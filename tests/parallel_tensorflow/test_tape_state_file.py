"""The state of every method, of one rank and summed, is in its file exactly, and can be loaded from there."""

import horovod.tensorflow as hvd
import pytest
import tiers
from gradients import draw
from identical import assert_identical
from tf_helpers import Reducer, make_variables, several

from hvd_sparse.checkpoint import load_state, save_state
from hvd_sparse.tensorflow import Compression

pytestmark = several
SHAPES = {"weight": (30, 20), "head": (500,), "bias": (20,)}
DENSITY = {"density": 0.05}
METHODS = {"hard_threshold": {"value": 0.5}} | dict.fromkeys(
    ("cltk", "dct", "dgc", "gradient_dropping", "micro", "random_k", "samomentum", "sidco", "topk"), DENSITY
)


@pytest.mark.parametrize("method", tiers.choice(METHODS, "cltk", "dgc", "micro"))
def test_a_state_of_any_method_is_in_its_file(method, tmp_path):
    variables = make_variables(SHAPES)
    compression = getattr(Compression, method)(list(variables.values()), min_numel=100, **METHODS[method])
    reduce = Reducer(variables, compression)
    for step in range(3):
        reduce(draw(SHAPES, step, hvd.rank()))
    for summed in (False, True):
        state = compression.state_dict(summed=summed)
        assert state["step"] == 3
        assert any(buffer.any() for buffers in state["memory"].values() for buffer in buffers.values())
        save_state(tmp_path / "state", state)
        assert_identical(load_state(tmp_path / "state"), state)
        compression.load_state_dict(load_state(tmp_path / "state"))
