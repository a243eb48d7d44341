#!/usr/bin/env bash
# The documentation as a site, in .site/html: ci/site.sh [ARGS of mkdocs; default: build --strict]. Fails for a link or an
# anchor that leads nowhere, and for a page that no table lists. Needs a package index when its packages have changed.
# Exit codes: 0 built, 1 a page that is wrong, 2 the packages could not be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
locked_environment site requirements/docs.txt
[ $# -gt 0 ] || set -- build --strict
exec "$VENV/bin/mkdocs" "$@"
