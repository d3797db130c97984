#!/usr/bin/env bash
# What takes longer than scripts/test.sh, before a release: whole runs over several seeds, and the control.
# Usage: scripts/test_full.sh [seeds|control|benchmarks]; without a part, all of them (about 25 minutes on 2 cores).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
make_environment .venv-test "[dev]"
part=${1:-all}
case "$part" in seeds | control | benchmarks | all) ;; *)
  echo "There is no part '$part'. Parts: seeds, control, benchmarks." >&2
  exit 2
  ;;
esac
wants() { [ "$part" = all ] || [ "$part" = "$1" ]; }
if wants seeds; then python benchmarks/improvement.py; fi
if wants control; then python benchmarks/control.py; fi
if wants benchmarks; then
  python benchmarks/engine.py
  python benchmarks/capture.py
fi
