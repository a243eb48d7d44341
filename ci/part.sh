#!/usr/bin/env bash
# One part of a nightly run: records HARNESS_CELLS (separated by blanks) of HARNESS_PROFILE into reports/HARNESS_PART; with
# HARNESS_RECORD=true for baselines. With HARNESS_FETCH=true, models and prompts are fetched first.
# Exit codes: 0 everything was recorded, 2 something could not be, 64 wrong usage; with HARNESS_SMOKE=true that of the
# verdict. Nothing is tried again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/annotate.sh
name="${HARNESS_PART:?}" profile="${HARNESS_PROFILE:?}"
read -r -d '' -a ids <<<"${HARNESS_CELLS:?}" || true
cells=()
for id in "${ids[@]}"; do cells+=(--cell "$id"); done
out="reports/$name"
# Files of an earlier run do not belong to this one.
rm -rf "$out"
mkdir -p "$out"
if [ "${HARNESS_FETCH:-}" = true ]; then
  if [ -z "${HF_TOKEN:-}" ] && [ -n "${BUILDKITE:-}" ] && [ "${HARNESS_SMOKE:-}" != true ]; then
    # Of the cluster's secrets, where the agent has none in its environment.
    HF_TOKEN="$(buildkite-agent secret get HF_TOKEN)" || printf 'ci: no HF_TOKEN for models behind a licence\n' >&2
    export HF_TOKEN
  fi
  # What cannot be had makes its own cells UNKNOWN.
  ci/harness.sh models --profile "$profile" "${cells[@]}" --download || printf 'ci: not all models could be fetched\n' >&2
  ci/harness.sh prompts build recipe --profile "$profile" || printf 'ci: not all prompts could be built\n' >&2
fi
what=(run --part)
if [ "${HARNESS_SMOKE:-}" = true ]; then what=(run); fi
if [ "${HARNESS_RECORD:-}" = true ]; then what=(baseline record --baselines "$out/baselines"); fi
code=0
ci/harness.sh "${what[@]}" --out "$out" --profile "$profile" "${cells[@]}" || code=$?
style=info
[ "$code" -eq 0 ] || style=warning
annotate "$name" "$style" "$out/latest/summary.md"
if [ "$code" -gt 128 ]; then
  # A run that was killed has its logs as the engines wrote them.
  ci/harness.sh clean --logs "$out" || printf 'ci: something of a killed run is left, see above\n' >&2
fi
# A link would be uploaded as a second copy.
find "$out" -name latest -type l -delete
exit "$code"
