#!/usr/bin/env bash
# Usage: ./run_tests.sh              lint, types and tests, as CI runs them; those with real engines come last
#        ./run_tests.sh fast         lint, types, unit and property tests: two minutes, no engine, no browser
#        ./run_tests.sh release      as without an argument, with the exhaustive tests: before a release
#        ./run_tests.sh PYTEST ARGS  only the tests that the arguments name
# Creates or updates .venv when needed, and installs Chromium before tests of the report pages.
set -euo pipefail
source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/scripts/environment.sh"
# Without its bytecode, the harness would be compiled at each of its hundred starts.
unset PYTHONDONTWRITEBYTECODE

check_source() {
  "$VENV/bin/ruff" check .
  "$VENV/bin/ruff" format --check .
  "$VENV/bin/lint-imports"
}

# Types are checked while the tests wait for their processes. Leaves its process in TYPES.
begin_types() {
  TYPES_SAID="$(mktemp)"
  nice "$VENV/bin/mypy" >"$TYPES_SAID" 2>&1 &
  TYPES=$!
  trap 'kill "$TYPES" 2>/dev/null; rm -f "$TYPES_SAID"' EXIT
}

end_types() {
  local code=0
  wait "$TYPES" || code=$?
  printf 'mypy: '; cat "$TYPES_SAID"
  rm -f "$TYPES_SAID"
  trap - EXIT
  return "$code"
}

# Five workers for two cores, because many tests wait for processes and for time to pass; files that wait and files that
# compute come in turns (tests/conftest.py). Long files come first, so that no worker is left with one at the end.
run_parallel() {
  local workers=$(( $(nproc) * 5 / 2 ))
  # In a fresh checkout each worker would compile all test modules, with what their assertions say.
  [ -d tests/unit/__pycache__ ] || "$VENV/bin/python" -m pytest --collect-only -qq "$@" >/dev/null || true
  "$VENV/bin/python" -m pytest --numprocesses "$workers" --dist loadfile --no-loadscope-reorder --durations 15 "$@"
}

# Source, types, and the tests of these arguments; all are done, and the first failure is the exit code.
run_without_engines() {
  local code=0 types=0
  check_source
  begin_types
  run_parallel "$@" || code=$?
  end_types || types=$?
  [ "$code" -ne 0 ] || code="$types"
  return "$code"
}

ensure_environment
cd "$ROOT"
case "${1-}" in
  ""|release)
    [ $# -le 1 ] || fail "expected no arguments after 'release', found: ${*:2}; to choose tests: $0 PYTEST ARGS"
    exhaustive=(); [ $# -eq 0 ] || exhaustive=(--exhaustive)
    ensure_chromium
    # Engines have the machine to themselves; everything else shares it.
    run_without_engines --ignore tests/engine "${exhaustive[@]}"
    exec "$VENV/bin/python" -m pytest tests/engine --durations 40 "${exhaustive[@]}"
    ;;
  fast)
    [ $# -eq 1 ] || fail "expected no arguments after 'fast', found: ${*:2}; to choose tests: $0 PYTEST ARGS"
    run_without_engines tests/unit tests/property
    ;;
  *) exec "$VENV/bin/python" -m pytest "$@" ;;
esac
