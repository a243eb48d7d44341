#!/usr/bin/env bash
# Usage: ./run_tests.sh              lint, types and all tests; those with real engines come last
#        ./run_tests.sh fast         lint, types, unit and property tests: a few minutes, no engine, no browser
#        ./run_tests.sh PYTEST ARGS  only the tests that the arguments name
# Creates or updates .venv when needed, and installs Chromium before tests of the report pages.
set -euo pipefail
source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/scripts/environment.sh"

check_source() {
  "$VENV/bin/ruff" check .
  "$VENV/bin/ruff" format --check .
  "$VENV/bin/mypy"
  "$VENV/bin/lint-imports"
}

run_parallel() { "$VENV/bin/python" -m pytest --numprocesses auto --dist loadfile --durations 15 "$@"; }

ensure_environment
cd "$ROOT"
case "${1-}" in
  "")
    ensure_chromium
    check_source
    # Engines have the machine to themselves; everything else shares it: two thirds of the time on two cores.
    run_parallel --ignore tests/engine
    exec "$VENV/bin/python" -m pytest tests/engine --durations 40
    ;;
  fast)
    [ $# -eq 1 ] || fail "expected no arguments after 'fast', found: ${*:2}; to choose tests: $0 PYTEST ARGS"
    check_source
    run_parallel tests/unit tests/property
    ;;
  *) exec "$VENV/bin/python" -m pytest "$@" ;;
esac
