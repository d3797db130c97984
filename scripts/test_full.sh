#!/usr/bin/env bash
# What takes longer than scripts/test.sh, before a release: whole runs over several seeds, the control, killed
# runs, what speed is held against, the gate on real candidates, and the longer runs of veRL beside its own tests.
# Usage: scripts/test_full.sh [tests|seeds|control|kills|benchmarks|promotion|verl|matrix]; without a part, all of them, one after the
# other.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
make_environment .venv-test "[dev]" agenttrain-sglang "agenttrain-verl[verl,sglang]"
part=${1:-all}
case "$part" in tests | seeds | control | kills | benchmarks | promotion | verl | matrix | all) ;; *)
  echo "There is no part '$part'. Parts: tests, seeds, control, kills, benchmarks, promotion, verl, matrix." >&2
  exit 2
  ;;
esac
wants() { [ "$part" = all ] || [ "$part" = "$1" ]; }
if wants tests; then
  python -m pytest -m long
  agenttrain sglang setup --device cpu
  (cd integrations/agenttrain-sglang && python -m pytest -m long)
fi
if wants seeds; then python benchmarks/improvement.py; fi
if wants control; then python benchmarks/control.py; fi
if wants kills; then python benchmarks/kills.py --kills 8 --equal 1; fi
if wants benchmarks; then
  python benchmarks/engine.py
  python benchmarks/capture.py
  python benchmarks/telemetry.py
  python benchmarks/fit_profile.py
  python benchmarks/sandbox.py
fi
if wants promotion; then
  python benchmarks/promotion.py
  python benchmarks/canary.py
fi
if wants verl; then
  agenttrain sglang setup --device cpu
  (cd integrations/agenttrain-verl && python -m pytest -m long)
fi
if wants matrix; then
  # The oldest column of the support matrix, in an environment of its own; it has to be the one that is written down
  if ! cmp -s tests/matrix/oldest.txt .venv-oldest/installed; then
    rm -rf .venv-oldest
    "${AGENTTRAIN_PYTHON:-python3.11}" -m venv .venv-oldest
    .venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -r tests/matrix/oldest.txt
    .venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c tests/matrix/oldest.txt -e .
    cp tests/matrix/oldest.txt .venv-oldest/installed
  fi
  .venv-oldest/bin/python scripts/matrix.py oldest
  python scripts/matrix.py table
  git diff --exit-code -- docs/matrix docs/any-graph.md README.md
fi
