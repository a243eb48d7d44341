#!/usr/bin/env bash
# The verdict of a nightly run: merges the parts below reports/parts into reports/merged. HARNESS_PROFILE is the profile
# of the whole run, HARNESS_CELLS the patterns (separated by blanks) of its cells; empty for all cells. With
# HARNESS_HISTORY, a folder that outlives checkouts, the night is kept there and the trend of all is shown beside it.
# With HARNESS_RECORD=true, the baselines that parts recorded are gathered in reports/baselines instead.
# Buildkite's parts are fetched here; GitHub's by the job. The exit code is the verdict's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/annotate.sh
profile="${HARNESS_PROFILE:?}"
options=(--keep-going --out reports/merged --expect "$profile")
read -r -d '' -a patterns <<<"${HARNESS_CELLS:-}" || true
for pattern in "${patterns[@]}"; do options+=(--cell "$pattern"); done
rm -rf reports/merged
mkdir -p reports/parts
if [ -n "${BUILDKITE:-}" ]; then
  rm -rf reports/parts
  mkdir -p reports/parts
  # Of a part that was run again by hand, both records are there: of each cell the first complete one counts.
  buildkite-agent artifact download --include-retried-jobs 'reports/part-*/**/*' reports/parts/ ||
    printf 'ci: the parts could not be fetched\n' >&2
fi

# The baselines of all parts, by the hardware that they belong to, under names that no two parts or machines share.
collect() {
  local path hardware part stem
  rm -rf reports/baselines
  mkdir reports/baselines
  while IFS= read -r -d '' path; do
    hardware="$(sed -n 's/^ *"hardware": "\(.*\)",$/\1/p;T;q' "$path" | tr -c 'A-Za-z0-9\n' -)"
    part="$(basename "$(dirname "$(dirname "$path")")")"
    stem="reports/baselines/$hardware/$(basename "$path" .json)-$hardware-$part"
    mkdir -p "$(dirname "$stem")"
    cp "$path" "$stem.json"
    cp "${path%.json}.csv" "$stem.csv"
    printf '%s\n' "$stem"
  done < <(find reports/parts -path '*/baselines/*.json' -print0 | sort -z)
  [ -n "$(ls reports/baselines)" ] || { printf 'ci: expected baselines of a part, found none\n' >&2; return 2; }
}

# Of each profile the newest nights, without logs.
keep() {
  local folder="$HARNESS_HISTORY/${profile//[^A-Za-z0-9._-]/_}" night said
  night="$folder/$(date -u +%Y%m%dT%H%M%SZ)"
  mkdir -p "$night"
  cp -r reports/merged/. "$night"
  rm -rf "$night/logs"
  find "$folder" -mindepth 1 -maxdepth 1 -type d -print0 | sort -z | head -z -n "-${HARNESS_NIGHTS:-60}" | xargs -0r rm -rf
  if said="$(ci/harness.sh trend "$folder" --out reports/merged)"; then
    printf '```\n%s\n```\n' "$said" | tee reports/merged/trend.md
    annotate trend info reports/merged/trend.md
  else
    printf 'ci: no trend; it takes two nights\n' >&2
  fi
}

if [ "${HARNESS_RECORD:-}" = true ]; then
  collect
  exit
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
if [ -n "${HARNESS_HISTORY:-}" ] && [ -f reports/merged/run.json ]; then
  keep || printf 'ci: the night could not be kept\n' >&2
fi
exit "$code"
