#!/usr/bin/env bash
# KV in several groups on a GPU: sliding windows with grouped-query attention, and recurrent state, by the kernels that
# vLLM has for them there.
# Minutes by plan on one GPU: record-windows 2, windows 5, record-states 2, states 3.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
windows=gpu-layouts states=gpu-hybrid cells=() few=() alone=(--cell 'single-*') limits=(240 480 240 480)
if [ "$device" = cpu ]; then
  windows=cpu-layouts states=cpu-hybrid cells=(--cell single-none) few=(--scenario cold)
  alone=(--cell single-none) limits=(80 60 80 60)
fi
mapfile -t into < <(into)
step record-windows "${limits[0]}" baseline record --profile "$windows" "${alone[@]}" "${into[@]}"
step windows "${limits[1]}" run --profile "$windows" "${cells[@]}" "${few[@]}"
step record-states "${limits[2]}" baseline record --profile "$states" "${alone[@]}" "${into[@]}"
step states "${limits[3]}" run --profile "$states" "${cells[@]}" "${few[@]}"
finish "$windows" "$states"
