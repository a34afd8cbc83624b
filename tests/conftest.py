"""Two tiers of tests, see tests/shared/tiers.py: `make test` runs a choice, `make test-all` all tests."""

import tiers

pytest_ignore_collect = tiers.pytest_ignore_collect
pytest_collection_modifyitems = tiers.pytest_collection_modifyitems
