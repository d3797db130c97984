#!/usr/bin/env bash
# Everything that guards a change, as CI runs it: format, lint, layers, types, tests, and one whole training run.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
make_environment .venv-test "[dev]"
set -x
ruff format --check .
ruff check .
lint-imports
mypy
python -m pytest
python -m pytest -m slow
