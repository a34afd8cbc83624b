"""Two tiers of tests. `make test` runs a choice that covers every pair of parameter values, `make test-all` everything.

The choice is the same on every rank and in every run. Naming a case (`pytest file.py::test[case]`) always runs it.
"""

import collections
import itertools
import os

import pytest

ALL = os.environ.get("HVD_SPARSE_TESTS") == "all"  # `make test-all` sets this variable


def examples(count):
    """Set the number of Hypothesis examples: all in `make test-all`, a fifth in `make test`; the same in every run."""
    from hypothesis import HealthCheck, settings  # imported here, because tests on a GPU run without Hypothesis

    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    drawn = count if ALL else max(10, count // 5)
    return settings(deadline=None, max_examples=drawn, derandomize=True, suppress_health_check=slow)


def choice(cases, *chosen):
    """Return parameters for `parametrize`, of which `make test` runs the chosen ones.

    Args:
        cases: All of them.
        chosen: Some of them.
    """
    assert set(chosen) < set(cases), "a case that does not exist was chosen, or all were"
    values = {case: case if isinstance(case, tuple) else (case,) for case in cases}
    return [pytest.param(*values[case], marks=[] if case in chosen else pytest.mark.exhaustive) for case in cases]


def covering(cases, strength=2):
    """Choose cases such that each pair of values in any case also occurs in a chosen case.

    Args:
        cases: A list of dicts {parameter: name of its value}, all with the same keys.
        strength: 2 for pairs, 1 for single values.

    Returns:
        The set of the chosen cases' positions in the list.
    """
    sets = [set(itertools.combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing, chosen, left = set().union(*sets), set(), dict(enumerate(sets))
    while missing:
        best = max(left, key=lambda position: (len(left[position] & missing), -position))
        missing -= left.pop(best)
        chosen.add(best)
    return chosen


def pytest_ignore_collect(collection_path, config):
    """With `-m MARK`, do not import files that have no such mark: it takes seconds on each rank."""
    mark = config.option.markexpr
    if mark.isidentifier() and collection_path.suffix == ".py" and mark not in collection_path.read_text():
        return True
    return None


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    """Deselect tests marked `exhaustive`, and combinations of parameters that add no new pair of values."""
    if ALL or any("::" in argument for argument in config.args):
        return
    functions = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            functions[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for cases in functions.values():
        if len(cases) == 1:
            kept.update(cases)
        else:
            strength = 1 if cases[0].get_closest_marker("each_value") else 2
            chosen = covering([dict(enumerate(case.callspec._idlist)) for case in cases], strength)  # ids as in [...]
            kept.update(case for position, case in enumerate(cases) if position in chosen)
    left_out = [item for item in items if item not in kept]
    if left_out:
        items[:] = [item for item in items if item in kept]
        config.hook.pytest_deselected(items=left_out)
