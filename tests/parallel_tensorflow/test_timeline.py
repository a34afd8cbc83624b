"""What Horovod's own timeline says of the collectives of a step."""

import json
import time

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from tf_helpers import assert_alive, reduce_through_tape, several

from hvd_sparse.tensorflow import Compression

pytestmark = several
STEPS = 20


def events_of(path):
    """Return the events of a timeline, which Horovod writes without an end."""
    text = path.read_text().rstrip().rstrip(",").removesuffix("]").rstrip().rstrip(",")
    return [event for event in json.loads(f"{text}]") if event]


@pytest.mark.parametrize(
    ("scope", "message"), [("tensor", "bucket.0"), pytest.param("model", "model", marks=pytest.mark.exhaustive)]
)
def test_every_collective_runs_in_every_step(tmp_path, scope, message):
    """A graph optimizer would fold what is constant, and run it once; nothing is fed here."""
    variables = {name: tf.Variable(tf.zeros([size]), name=name) for name, size in (("large", 5000), ("small", 10))}
    compression = Compression.dgc(list(variables.values()), density=0.01, scope=scope)
    ones = {name: tf.ones(variable.shape) for name, variable in variables.items()}
    step = tf.function(lambda: reduce_through_tape(variables, ones, compression), autograph=False)
    hvd.start_timeline(str(tmp_path / "timeline.json"))
    for _ in range(STEPS):
        step()
    time.sleep(1)  # a thread of its own writes it
    hvd.stop_timeline()
    assert_alive()  # the next cycle of Horovod closes the file
    time.sleep(0.1)
    if hvd.rank() > 0:  # rank 0 has it
        return
    events = events_of(tmp_path / "timeline.json")
    names = {event["pid"]: event["args"]["name"] for event in events if "name" in event.get("args", {})}

    def runs(tensor, kind):
        begins = (e for e in events if e.get("ph") == "B" and e["name"] == kind)
        return sum(names[event["pid"]].endswith(tensor) for event in begins)

    assert runs(f".{message}", "ALLGATHER") == STEPS
    assert runs(".present", "ALLREDUCE") == STEPS
    assert runs(".vote", "ALLREDUCE") == STEPS
    compressor = compression._parts.exchange.describe().removeprefix("compressor = ").replace(".", "_")
    assert runs(f"{compressor}_large_0", "ALLREDUCE") == STEPS  # a token
    assert runs(f"{compressor}_small_0", "ALLREDUCE") == STEPS  # dense
    assert sum("HorovodAllreduce_" in name for name in names.values()) == 2  # and no others
