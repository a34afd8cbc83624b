"""log_to reports the numbers of stats() after the requested steps."""

import horovod.torch as hvd
import pytest
from gradients import draw
from helpers import drive, make_parameters

from hvd_sparse.torch import Compression

SHAPES = {"big": (120, 50), "small": (64,)}


@pytest.mark.skipif(hvd.size() == 1, reason="Horovod compresses nothing with one process")
def test_each_step_is_reported_as_stats_tells_it():
    parameters = make_parameters(SHAPES)
    compressor = Compression.gradient_dropping(parameters.items(), density=0.01)
    reports = []
    compressor.log_to(lambda numbers, step: reports.append((step, numbers)), every=2, prefix="rank")
    for t in range(5):
        drive(compressor, parameters, draw(SHAPES, t, hvd.rank()))
        stats = compressor.stats()
        if t % 2:
            step, numbers = reports[-1]
            assert step == t + 1 == stats["steps"]
            assert numbers["rank/payload_bytes"] == stats["step"]["payload_bytes"] > 0
            assert numbers["rank/received_bytes"] == stats["step"]["received_bytes"]
            assert numbers["rank/ratio"] == stats["step"]["ratio"]
            assert numbers["rank/residual_norm"] == stats["residual_norm"] > 0.0
            assert numbers["rank/seconds/compress"] == stats["step"]["seconds"]["compress"] > 0.0
    assert [step for step, _ in reports] == [2, 4]
    compressor.log_to(None)
    drive(compressor, parameters, draw(SHAPES, 5, hvd.rank()))
    assert len(reports) == 2


def test_a_wrong_writer_is_refused():
    compressor = Compression.gradient_dropping(make_parameters(SHAPES).items())
    with pytest.raises(TypeError, match="writer must be a SummaryWriter"):
        compressor.log_to("runs")
