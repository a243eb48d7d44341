#!/usr/bin/env bash
# Sets up .venv and Chromium when needed, then lint, types and all tests, real engines included.
# With arguments, only the tests that they name: ./run_tests.sh [PYTEST ARGS]
set -euo pipefail
source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/scripts/environment.sh"
ensure_environment
cd "$ROOT"
if [ $# -eq 0 ]; then
  ensure_chromium
  "$VENV/bin/ruff" check .
  "$VENV/bin/ruff" format --check .
  "$VENV/bin/mypy"
fi
exec "$VENV/bin/python" -m pytest "$@"
