#!/usr/bin/env bash
# Pairs whose P and D have unlike tensor-parallel sizes, on three GPUs: what each rank of D reads from the ranks of P, and
# what the caches of all ranks hold.
# Minutes by plan on one GPU: record 2, ranks 4.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
profile=gpu-ranks cells=() few=() alone=(--cell 'single-*') limits=(300 480)
if [ "$device" = cpu ]; then
  profile=cpu cells=(--cell single-none) few=(--scenario cold) alone=(--cell single-none) limits=(90 90)
fi
mapfile -t into < <(into)
step record "${limits[0]}" baseline record --profile "$profile" "${alone[@]}" "${into[@]}"
step ranks "${limits[1]}" run --profile "$profile" "${cells[@]}" "${few[@]}"
finish "$profile"
