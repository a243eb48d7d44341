#!/usr/bin/env bash
# Sets up .venv when needed, then runs the matrix: ./run_matrix.sh ARGS = python -m harness run ARGS
set -euo pipefail
source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/scripts/environment.sh"
ensure_environment
exec "$VENV/bin/python" -m harness run "$@"
