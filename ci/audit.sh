#!/usr/bin/env bash
# Known vulnerabilities of both locks: ci/audit.sh [ARGS of scripts/audit.py]. Needs a package index and an advisory
# service, and none of the locked packages but the few that look them up.
# Exit codes: 0 clean, 1 vulnerable, 2 something could not be looked up, 64 a damaged list of exceptions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
small_environment audit pip-audit pydantic pyyaml packaging
exec "$VENV/bin/python" scripts/audit.py "$@"
