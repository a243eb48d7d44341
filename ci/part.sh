#!/usr/bin/env bash
# One part of a night: ci/part.sh NAME TRIES [ARGS of harness run]. Records into reports/NAME.
# Exit codes: 0 everything was recorded, 2 something could not be (only then it is tried again), 64 wrong usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/annotate.sh
name="$1" tries="$2"
shift 2
out="reports/$name"
# What an earlier night left behind is no part of this one.
rm -rf "${out:?}"
mkdir -p "$out"
if [ -n "${HARNESS_FETCH:-}" ]; then
  # Models and prompts of this part's cells; what cannot be had makes its own cells UNKNOWN.
  profile=() cells=()
  for ((i = 1; i < $#; i++)); do
    next=$((i + 1))
    case "${!i}" in
      --profile) profile=("${!next}") ;;
      --cell) cells+=(--cell "${!next}") ;;
    esac
  done
  ci/harness.sh models "${profile[@]}" "${cells[@]}" --download || printf 'ci: not all models could be fetched\n' >&2
  ci/harness.sh prompts build --for-profile "${profile[@]}" || printf 'ci: not all prompts could be built\n' >&2
fi
for ((try = 1; ; try++)); do
  code=0
  ci/harness.sh run --part --out "$out" "$@" || code=$?
  style=info
  [ "$code" -eq 0 ] || style=warning
  annotate "$name" "$style" "$out/latest/summary.md"
  if [ "$code" -ne 2 ] || [ "$try" -ge "$tries" ]; then break; fi
  printf 'ci: try %s of %s could not record everything; trying again\n' "$try" "$tries" >&2
done
if [ "$code" -gt 128 ]; then
  # A run that was killed has its logs as the engines wrote them.
  ci/harness.sh clean --logs "$out" || printf 'ci: something of a killed run is left, see above\n' >&2
fi
# A link would be uploaded as a second copy.
rm -f "$out/latest"
exit "$code"
