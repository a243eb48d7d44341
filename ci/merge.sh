#!/usr/bin/env bash
# The verdict of a nightly run: merges the parts below reports/parts into reports/merged. HARNESS_PROFILE is the profile
# of the whole run, HARNESS_CELLS the patterns (separated by blanks) of its cells; empty for all cells.
# Buildkite's parts are fetched here; GitHub's by the job. The exit code is the verdict's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/annotate.sh
options=(--keep-going --out reports/merged --expect "${HARNESS_PROFILE:?}")
read -r -d '' -a patterns <<<"${HARNESS_CELLS:-}" || true
for pattern in "${patterns[@]}"; do options+=(--cell "$pattern"); done
rm -rf reports/merged
if [ -n "${BUILDKITE:-}" ]; then
  rm -rf reports/parts
  mkdir -p reports/parts
  # Of a part that was tried again, both records count.
  buildkite-agent artifact download --include-retried-jobs 'reports/part-*/**/*' reports/parts/ ||
    printf 'ci: the parts could not be fetched\n' >&2
fi
code=0
ci/harness.sh merge reports/parts "${options[@]}" || code=$?
summary=reports/merged/summary.md
if [ ! -f "$summary" ]; then
  mkdir -p reports/merged
  printf '# No verdict\n\nThe parts could not be merged and judged; the log of this step says why.\n' >"$summary"
  # Nothing judged is never a pass.
  [ "$code" -ne 0 ] || code=2
fi
case "$code" in 0) style=success ;; 2 | 3 | 4) style=warning ;; *) style=error ;; esac
annotate verdict "$style" "$summary"
exit "$code"
