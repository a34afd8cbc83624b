"""Two tiers of tests, see tests/shared/tiers.py: `make test` runs a choice of them, `make test-all` all."""

import tiers

pytest_collection_modifyitems = tiers.pytest_collection_modifyitems
