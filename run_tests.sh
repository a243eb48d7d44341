#!/usr/bin/env bash
# Sets up .venv and Chromium when needed, then lint, types and all tests, real engines included.
# With arguments, only the tests that they name: ./run_tests.sh [PYTEST ARGS]
set -euo pipefail
source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/scripts/environment.sh"
ensure_environment
cd "$ROOT"
if [ $# -gt 0 ]; then
  exec "$VENV/bin/python" -m pytest "$@"
fi
ensure_chromium
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
# Engines have the machine to themselves; everything else shares it: two thirds of the time on two cores.
"$VENV/bin/python" -m pytest --numprocesses auto --dist loadfile --ignore tests/engine --durations 15
exec "$VENV/bin/python" -m pytest tests/engine --durations 40
