"""Several kinds of log writers, and the steps at which numbers are reported."""

import pytest
import tensorflow as tf
from tensorboard_events import events

from hvd_sparse.log import Log, numbers_of

STATS = {
    "steps": 3,
    "step": {
        "dense_bytes": 800,
        "payload_bytes": 100,
        "received_bytes": 300,
        "ratio": 8.0,
        "density": 0.01,
        "seconds": {"compress": 0.25, "exchange": 0.5, "decompress": 0.125},
    },
    "total": {},
    "residual_norm": 1.5,
    "skipped": 2,
    "dense_fallback": {"rule": "bytes"},
}
NUMBERS = {
    "run/ratio": 8.0,
    "run/density": 0.01,
    "run/payload_bytes": 100.0,
    "run/received_bytes": 300.0,
    "run/residual_norm": 1.5,
    "run/skipped": 2.0,
    "run/seconds/compress": 0.25,
    "run/seconds/exchange": 0.5,
    "run/seconds/decompress": 0.125,
}


def test_names_and_numbers():
    assert numbers_of(STATS, "run") == NUMBERS


def test_of_a_pipeline_there_is_neither_norm_nor_skipped_step():
    stats = {name: STATS[name] for name in ("steps", "step", "total")}
    missing = ("run/residual_norm", "run/skipped")
    assert numbers_of(stats, "run") == {name: number for name, number in NUMBERS.items() if name not in missing}


def test_a_function_is_called_in_its_turn():
    calls, asked = [], []

    def stats():
        asked.append(1)
        return STATS

    log = Log(lambda numbers, step: calls.append((step, numbers)), every=3, prefix="run")
    for step in range(1, 8):
        log.report(stats, step)
    assert calls == [(3, NUMBERS), (6, NUMBERS)]
    assert len(asked) == 2, "the norm is not taken for steps that are not reported"


def test_a_writer_of_torch(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(tmp_path))
    Log(writer, every=1, prefix="run").report(lambda: STATS, 5)
    writer.close()
    assert events(tmp_path) == {name: {5: pytest.approx(number)} for name, number in NUMBERS.items()}


def test_a_writer_of_tensorflow(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))
    Log(writer, every=1, prefix="run").report(lambda: STATS, 5)
    writer.close()
    assert events(tmp_path) == {name: {5: pytest.approx(number)} for name, number in NUMBERS.items()}


def test_other_writers_are_refused():
    with pytest.raises(TypeError, match=r"writer must be .* got int"):
        Log(3, 1, "run")
    for every, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="every must be an integer of at least 1, got"):
            Log(print, every, "run")
