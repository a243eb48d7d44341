#!/usr/bin/env bash
# Known vulnerabilities of both locks: ci/audit.sh [ARGS of scripts/audit.py]. Needs a package index and an advisory
# service, and none of the locked packages but the few that look them up.
# Exit codes: 0 clean, 1 vulnerable, 2 something could not be looked up, 64 a damaged list of exceptions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment="$PWD/.audit"
"${PYTHON:-python3}" -m venv --clear "$environment" || exit 2
# As locked: a constraint installs nothing by itself.
grep -v -e '^torch' -e '^vllm' requirements/cpu.txt >"$environment/constraints.txt"
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
  --constraint "$environment/constraints.txt" pip-audit pydantic pyyaml packaging || exit 2
exec "$environment/bin/python" scripts/audit.py "$@"
