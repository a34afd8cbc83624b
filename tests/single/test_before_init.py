"""A compressor that is built before hvd.init(), used after hvd.shutdown(), or saved after another rank has ended."""

import sys

import launching
import pytest
import tiers
from launching import KERAS_2, launch, mpirun

pytestmark = launching.MARKS
BUILDS = {
    "torch": """
import horovod.torch as hvd, torch
from hvd_sparse.torch import Compression
def build(**settings):
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    compression = Compression.dgc([("weight", weight)], 0.01, momentum=0.9, **settings)
    compression.weight = weight
    return compression
def train(compression, **settings):
    weight = compression.weight
    sgd = torch.optim.SGD([weight], 0.1)
    optimizer = hvd.DistributedOptimizer(sgd, [("weight", weight)], compression=compression, **settings)
    (weight * weight).sum().backward()
    optimizer.step()
""",
    "tensorflow": """
import horovod.tensorflow as hvd, tensorflow as tf
from hvd_sparse.tensorflow import Compression
weight = tf.Variable(tf.zeros([64, 64]))
def build(**settings):
    return Compression.dgc([weight], 0.01, momentum=0.9, **settings)
def train(compression, **settings):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * weight)
    hvd.DistributedGradientTape(tape, compression=compression, **settings).gradient(loss, [weight])
""",
}
USE = """
def check(compression):
    uses = (compression.state_dict, False), (compression.state_dict, True), (compression.load_state_dict, {})
    for use, argument in uses:
        try:
            use(argument)
        except RuntimeError as error:
            assert "call hvd.init() first" in str(error), error
        else:
            raise AssertionError("no error")
whole, part = build(), build(process_set=hvd.ProcessSet([0]))
print(repr(whole))
check(whole)
check(part)
hvd.init()
train(whole)
assert whole.stats()["steps"] == 1, whole.stats()
hvd.shutdown()
check(whole)
check(part)
print("checked")
"""


@pytest.mark.parametrize("framework", tiers.choice(BUILDS, "torch"))
def test_before_init_and_after_shutdown(framework, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(BUILDS[framework] + USE)
    code, output = launch([*mpirun(2), sys.executable, str(script)], KERAS_2)
    assert code == 0 and output.count("checked") == 2, output
    assert "SparseCompressor" in output and "momentum=0.9" in output and " object at " not in output


SAVE = """
import time
ones = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[ones])
whole, part = build(), build(process_set=ones)
train(whole)
if hvd.rank() < 2:
    train(part, process_set=ones)
    assert part.state_dict()["ranks"] == 2
hvd.allgather_object(0)  # all have trained
if hvd.rank() == 2:
    sys.exit()  # Horovod then ends on all ranks, and forgets its process sets
if hvd.rank() == 1:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
else:
    try:
        hvd.allgather_object(0)  # which no other rank takes part in
    except Exception as error:
        print("Horovod has ended:", type(error).__name__)
    for compression, ranks in ((whole, 3), (part, 2)):
        state = compression.state_dict()
        assert (state["ranks"], state["rank"], state["step"], compression.stats()["steps"]) == (ranks, 0, 1, 1), state
    print("both states are there")
    open(sys.argv[1], "w").close()
"""


@pytest.mark.parametrize("framework", tiers.choice(BUILDS, "torch"))
def test_a_state_is_saved_after_another_rank_has_ended(framework, tmp_path):
    script = tmp_path / "job.py"
    script.write_text("import os, sys" + BUILDS[framework] + SAVE)
    _, output = launch([*mpirun(3), sys.executable, str(script), str(tmp_path / "done")], KERAS_2)
    assert "Horovod has ended" in output and "both states are there" in output, output
