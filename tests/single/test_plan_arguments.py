"""The arguments of `hvd_sparse plan`: numbers with units, and what is refused."""

import pytest

from hvd_sparse import plan

FLAGS = ["--parameters", "1e6", "--compute-ms", "10", "--bandwidth", "1gbit", "--ranks", "4"]


@pytest.mark.parametrize(("text", "value"), [("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("100mbit", 1e8), ("8kbit", 8e3)])
def test_rates(text, value):
    assert plan.rate(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25.6e6", 25_600_000),
        ("25.6M", 25_600_000),
        ("1.1k", 1100),
        ("7G", 7_000_000_000),
        ("3", 3),
        ("7B", 7_000_000_000),
        ("1t", 10**12),
    ],
)
def test_counts(text, value):
    assert plan.count(text) == value


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (["--bandwidth", "1000"], "must end with kbit, mbit or gbit, such as 1gbit; got '1000'"),
        (["--bandwidth", "fastgbit"], "must be a number above 0, and finite; got 'fastgbit'"),
        (["--bandwidth", "gbit"], "must be a number above 0, and finite; got 'gbit'"),
        (["--bandwidth", "0gbit"], "must be a number above 0, and finite; got '0gbit'"),
        (["--parameters", "x"], "must be a whole number above 0, such as 25.6e6; got 'x'"),
        (["--parameters", "nan"], "must be a whole number above 0, such as 25.6e6; got 'nan'"),
        (["--parameters", "0"], "must be a whole number above 0, such as 25.6e6; got '0'"),
        (["--parameters", "1.5"], "must be a whole number above 0, such as 25.6e6; got '1.5'"),
        (["--parameters", "inf"], "must be a whole number above 0, such as 25.6e6; got 'inf'"),
        (["--compute-ms", "x"], "must be a number above 0, and finite; got 'x'"),
        (["--compute-ms", "inf"], "must be a number above 0, and finite; got 'inf'"),
        (["--compute-ms", "-1"], "must be a number above 0, and finite; got '-1'"),
        (["--latency-us", "-1"], "must be a number of at least 0, and finite; got '-1'"),
        (["--overlap", "1.5"], "--overlap must be in [0, 1], got 1.5"),
        (["--ranks", "1"], "--ranks must be 2 at least, got 1"),
    ],
)
def test_wrong_flags_are_refused(changed, told, capsys):
    with pytest.raises(SystemExit):
        plan.main([*FLAGS, *changed])
    assert told in capsys.readouterr().err


def test_a_network_is_given_or_measured(capsys):
    with pytest.raises(SystemExit):
        plan.main(FLAGS[:4])
    assert "give --bandwidth and --ranks, or --measure" in capsys.readouterr().err


def test_tensorflow_has_no_distributed_data_parallel(capsys):
    with pytest.raises(SystemExit):
        plan.main([*FLAGS, "--host", "ddp", "--framework", "tensorflow"])
    assert "--host ddp is for PyTorch, got --framework tensorflow" in capsys.readouterr().err
