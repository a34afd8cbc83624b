"""Tests that need a GPU. Without one, all of them are skipped, with the reason."""

from pathlib import Path

import pytest
from gpu_helpers import reason_to_skip

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    reason = reason_to_skip()
    for item in items:
        if reason and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=reason))
