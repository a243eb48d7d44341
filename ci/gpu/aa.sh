#!/usr/bin/env bash
# Five repetitions of the probe models on a GPU, on the same engines: every finding is a false alarm.
# Minutes by plan on one GPU: aa 10.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
profile=gpu repeat=5 prompts=3 cells=() limits=(1200)
some=(--scenario cold --scenario prefix-hit --scenario concurrent)
if [ "$device" = cpu ]; then
  profile=cpu repeat=2 prompts=1 cells=(--cell single-none) some=(--scenario cold) limits=(90)
fi
step aa "${limits[0]}" aa --profile "$profile" --repeat "$repeat" --prompts "$prompts" "${cells[@]}" "${some[@]}"
finish
