#!/usr/bin/env bash
# The main job on a fresh machine: install, then train the example agent and print its report. About 5 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
make_environment .venv
agenttrain fit examples/order-desk/graph.py --seed "${1:-1}"
