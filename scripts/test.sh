#!/usr/bin/env bash
# Everything that guards a change, as CI runs it: format, lint, layers, types, tests (the support matrix and the tokenizers
# of real models among them), whole training runs, and the integrations against their real upstreams.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
make_environment .venv-test "[dev]" agenttrain-sglang "agenttrain-verl[verl,sglang]"
if scripts/tokenizers.sh; then
  export AGENTTRAIN_REQUIRE_TOKENIZERS=1
else
  echo "The real tokenizers can't be brought: the tests that need them are skipped, and say so." >&2
fi
if ! command -v bwrap >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  { apt-get update && apt-get install -y --no-install-recommends bubblewrap; } >/dev/null || true
fi
command -v bwrap >/dev/null || echo "bubblewrap is missing: the tests of its sandboxes are skipped, and say so." >&2
set -x
ruff format --check .
ruff check .
lint-imports
mypy
python -m pytest
python -m pytest -m "slow and not long"
agenttrain sglang setup --device cpu
cd integrations/agenttrain-sglang
ruff format --check .
ruff check .
mypy
python -m pytest
python -m pytest -m "sglang and not long"
cd ../agenttrain-verl
ruff format --check .
ruff check .
mypy
python -m pytest
python -m pytest -m "verl and not long"
