#!/usr/bin/env bash
# The parts of a nightly run, for a CI system: ci/plan.sh github|buildkite. On GitHub they are the step's output
# `matrix`; on Buildkite their steps are uploaded. Planning needs neither vLLM nor models.
# NIGHT_PROFILE (cpu), NIGHT_CELLS (patterns, separated by blanks), NIGHT_MINUTES, NIGHT_GPUS and NIGHT_RECORD (true for
# baselines) are options of `harness ci`; NIGHT_QUEUE and NIGHT_VERDICT_QUEUE are Buildkite's alone. NIGHT_SMOKE is the
# profile of the smoke stage, without whose PASS no part starts; `none`: no such stage. Empty: smollm2-gpu-quick before
# nightly and what is named after it, none before others. Baselines are recorded without one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
system="${1:?expected github or buildkite}"
smoke="${NIGHT_SMOKE:-}"
case "${NIGHT_PROFILE:-cpu}" in nightly | nightly-*) smoke="${smoke:-smollm2-gpu-quick}" ;; esac
if [ "$smoke" = none ] || [ "${NIGHT_RECORD:-}" = true ]; then smoke=""; fi
# gpus_for ARRAY PROFILE. NIGHT_GPUS may be set for a night on GPUs, and a smoke lane or stage be on CPUs.
gpus_for() {
  local -n to="$1"
  local whole
  [ -n "${NIGHT_GPUS:-}" ] || return 0
  whole="$(ci/harness.sh plan --full --profile "$2")"
  grep -qx '  device: cpu' <<<"$whole" || to+=(--gpus "$NIGHT_GPUS")
}
options=(--profile "${NIGHT_PROFILE:-cpu}")
read -r -d '' -a patterns <<<"${NIGHT_CELLS:-}" || true
for pattern in "${patterns[@]}"; do options+=(--cell "$pattern"); done
[ -z "${NIGHT_MINUTES:-}" ] || options+=(--minutes-per-step "$NIGHT_MINUTES")
gpus_for options "${NIGHT_PROFILE:-cpu}"
[ "${NIGHT_RECORD:-}" != true ] || options+=(--record)
case "$system" in
  github)
    matrix="$(ci/harness.sh ci matrix "${options[@]}")"
    gate=""
    if [ -n "$smoke" ]; then
      first=(--profile "$smoke" --minutes-per-step 60)
      gpus_for first "$smoke"
      gate="$(ci/harness.sh ci matrix "${first[@]}")"
    fi
    printf 'matrix=%s\nsmoke=%s\n' "$matrix" "$gate" >>"$GITHUB_OUTPUT"
    ;;
  buildkite)
    [ -z "${NIGHT_QUEUE:-}" ] || options+=(--queue "$NIGHT_QUEUE")
    [ -z "${NIGHT_VERDICT_QUEUE:-}" ] || options+=(--verdict-queue "$NIGHT_VERDICT_QUEUE")
    [ -z "$smoke" ] || options+=(--smoke "$smoke")
    mkdir -p reports
    ci/harness.sh ci buildkite "${options[@]}" >reports/pipeline.json
    # Dollar signs are data.
    buildkite-agent pipeline upload --no-interpolation reports/pipeline.json
    ;;
  *)
    printf "ci: expected github or buildkite, found '%s'\n" "$system" >&2
    exit 64
    ;;
esac
