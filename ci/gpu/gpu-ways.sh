#!/usr/bin/env bash
# The probe models in the ways in which GPU engines can do the same (model runner V1, CUDA graphs, synchronous scheduling,
# buffers on the host, Triton attention), each judged by the baselines of the profile `gpu` of this kind of GPU, which are
# recorded where baselines/gpu is empty.
# Minutes by plan on one GPU: record 2, each way 4.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ways=(usual v1 graphs sync host triton) usual=gpu profile=gpu-ways few=() alone=(--cell 'single-*') limits=(300 480)
if [ "$device" = cpu ]; then
  # V2 judged by what V1 recorded.
  ways=(v2) usual=cpu profile=cpu-v2 few=(--scenario cold) alone=(--cell single-none) limits=(90 90)
  cells=(--cell single-none)
fi
each_way
finish "$usual"
