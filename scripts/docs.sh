#!/usr/bin/env bash
# Add to .venv what the documentation site is built with.
. "$(dirname "$0")/step.sh"

step "packages for the documentation" pip install --quiet -r "$ROOT/requirements-docs.txt"
